//! `tandem capture`: everything that can be observed, in one archive that may be given away.
//!
//! It holds no prompt, no answer and no secret: what is read says nothing of them, what may name a secret is left out of the
//! manifest, and the secrets that are known here are looked for in the logs. [`super::diagnose`] judges it later as it would have
//! judged then.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use futures::future::join_all;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::console;
use crate::diagnose::{LookArgs, Target, judge, observe};
use crate::http::{Http, Road, Trust};

/// The folder in the archive.
const FOLDER: &str = "tandem-capture";
/// What is judged later, in it.
pub const RECORD: &str = "tandem-capture/record.json";
/// The end of each log.
const LOG_BYTES: u64 = 4 << 20;
const METRICS_BYTES: usize = 8 << 20;
const READ: Duration = Duration::from_secs(5);
/// In the place of what is left out.
const LEFT_OUT: &str = "(left out)";

/// `tandem capture`.
#[derive(Debug, Args)]
pub struct CaptureArgs {
    /// The archive to write [default: tandem-capture-TIME.tar here]
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    look: LookArgs,
}

/// Observes and writes the archive.
pub async fn capture(args: CaptureArgs, plugin: bool) -> ExitCode {
    match run(&args, plugin).await {
        Ok(said) => {
            let _ = writeln!(std::io::stdout(), "{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            console::error(&error);
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &CaptureArgs, plugin: bool) -> Result<String, String> {
    let target = args.look.target(plugin).await?;
    let name = format!(
        "tandem-capture-{}.tar",
        jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ")
    );
    let path = args.output.clone().unwrap_or_else(|| PathBuf::from(name));
    let failed = |error: std::io::Error| format!("{}: {error}; choose another file with -o", path.display());
    // before the looks, which take their time
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    let mut files = Files::default();
    let record = observe(&args.look, &target).await?;
    let (verdict, text) = judge(&record);
    files.json("record.json", &json!({ "record": record, "verdict": verdict }));
    files.add("verdict.txt", text.into_bytes());
    router(&target, &mut files).await;
    metrics(&target, &mut files).await;
    of_up(&target, &mut files);
    of_cluster(&target, &mut files).await;
    files.json(
        "versions.json",
        &json!({
            "tandem": env!("CARGO_PKG_VERSION"),
            "engines": record.engines.iter().map(|engine| (engine.endpoint.clone(), json!(engine.info))).collect::<BTreeMap<_, _>>(),
        }),
    );
    let (count, bytes) = files.write(file).map_err(failed)?;
    Ok(format!(
        "{}: {count} files, {bytes} bytes; tandem diagnose --from {} judges it",
        path.display(),
        path.display()
    ))
}

/// What goes into the archive.
#[derive(Debug, Default)]
struct Files(BTreeMap<String, Vec<u8>>);

impl Files {
    fn add(&mut self, name: &str, content: Vec<u8>) {
        self.0.insert(format!("{FOLDER}/{name}"), content);
    }

    fn json(&mut self, name: &str, content: &Value) {
        self.add(name, serde_json::to_vec_pretty(content).unwrap_or_default());
    }

    fn write(self, file: File) -> std::io::Result<(usize, usize)> {
        let sizes = (self.0.len(), self.0.values().map(Vec::len).sum());
        let mut archive = tar::Builder::new(file);
        for (name, content) in self.0 {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o600);
            archive.append_data(&mut header, name, content.as_slice())?;
        }
        archive.into_inner()?.sync_all()?;
        Ok(sizes)
    }
}

/// The router's own views, as they are: requests of late, connections, engines, knobs in effect.
async fn router(target: &Target, files: &mut Files) {
    let Some(admin) = target.admin_port() else {
        return;
    };
    for view in ["connections", "endpoints", "loads", "traffic", "knobs"] {
        let found = admin.get::<Value>(&format!("/admin/{view}")).await;
        files.json(&format!("router/{view}.json"), &json!(found));
    }
}

async fn metrics(target: &Target, files: &mut Files) {
    let asked = target
        .ops
        .iter()
        .map(|(name, place)| async move { (name, metrics_of(place, &target.road).await) });
    for (name, found) in join_all(asked).await {
        let text = found.unwrap_or_else(|why| format!("# not read: {why}\n").into_bytes());
        files.add(&format!("metrics/{name}.txt"), text);
    }
}

async fn metrics_of(place: &str, road: &Road) -> Result<Vec<u8>, String> {
    let http = Http::over(&format!("http://{place}"), Trust::new(None)?, road.clone())?;
    let request = Request::get("/")
        .body(Full::default())
        .map_err(|error| error.to_string())?;
    let whole = async {
        let answer = http
            .send("/metrics", request)
            .await
            .map_err(|error| error.to_string())?;
        answer.whole(METRICS_BYTES).await.map_err(|error| error.to_string())
    };
    timeout(READ, whole)
        .await
        .map_err(|_| format!("no answer within {} s", READ.as_secs()))?
}

/// What only `tandem up` has: its state, the manifest, logs.
fn of_up(target: &Target, files: &mut Files) {
    let Some(up) = &target.up else {
        return;
    };
    files.json("state.json", &json!(up.state));
    if let Some(mut manifest) = up.manifest() {
        leave_out(&mut manifest);
        files.json("manifest.json", &manifest);
    }
    let Some(logs) = &up.state.log_dir else {
        return;
    };
    let secrets = target.secrets();
    let names = up
        .state
        .processes
        .iter()
        .map(|process| process.name.as_str())
        .chain(["tandem"]);
    for name in names {
        let file = format!("{name}.log");
        if let Ok(text) = tail(&logs.join(&file)) {
            files.add(&format!("logs/{file}"), clean(&text, &secrets).into_bytes());
        }
    }
}

/// What only a cluster has: the object and its pods, events, logs.
async fn of_cluster(target: &Target, files: &mut Files) {
    let Some(run) = &target.cluster else {
        return;
    };
    let mut object = run.object();
    leave_out(&mut object);
    files.json("deployment.json", &object);
    files.json("pods.json", &run.pods());
    files.json("events.json", &run.events().await);
    let secrets = target.secrets();
    for (name, log) in run.logs().await {
        let text = log.unwrap_or_else(|why| format!("not read: {why}\n"));
        let text = end(&text, LOG_BYTES as usize);
        files.add(&format!("logs/{name}"), clean(text, &secrets).into_bytes());
    }
}

/// The end of a text, from the beginning of a line.
fn end(text: &str, limit: usize) -> &str {
    let Some(skipped) = text.len().checked_sub(limit).filter(|skipped| *skipped > 0) else {
        return text;
    };
    let rest = &text.as_bytes()[skipped..];
    let line = rest
        .iter()
        .position(|byte| *byte == b'\n')
        .map_or(rest.len(), |end| end + 1);
    // a line begins at a character
    text.get(skipped + line..).unwrap_or_default()
}

/// Values of environment variables may be secrets.
fn leave_out(manifest: &mut Value) {
    match manifest {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::Array(variables) if name == "env" => {
                        let values = variables.iter_mut().filter_map(|variable| variable.get_mut("value"));
                        values.for_each(|value| *value = LEFT_OUT.into());
                    }
                    value => leave_out(value),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(leave_out),
        _ => {}
    }
}

/// The end of a file, from the beginning of a line.
fn tail(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let skipped = size.saturating_sub(LOG_BYTES);
    file.seek(SeekFrom::Start(skipped))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if skipped == 0 {
        return Ok(text);
    }
    Ok(text
        .split_once('\n')
        .map(|(_, rest)| rest.to_owned())
        .unwrap_or_default())
}

/// Without what others' libraries write when everything is asked for, which may be bytes of requests, and without secrets.
fn clean(log: &str, secrets: &[&str]) -> String {
    let kept = log.lines().filter(|line| !line.contains("TRACE"));
    let mut text = kept.fold(String::with_capacity(log.len()), |mut text, line| {
        text.push_str(line);
        text.push('\n');
        text
    });
    for secret in secrets {
        text = text.replace(secret, LEFT_OUT);
    }
    text
}

/// What was observed, of an archive.
pub fn record(archive: File, limit: u64) -> Result<Vec<u8>, String> {
    let mut archive = tar::Archive::new(archive);
    let entries = archive.entries().map_err(|error| error.to_string())?;
    for entry in entries {
        let mut entry = entry.map_err(|error| error.to_string())?;
        if entry.path().is_ok_and(|path| path == Path::new(RECORD)) {
            let mut bytes = Vec::new();
            let read = (&mut entry).take(limit).read_to_end(&mut bytes);
            return read.map(|_| bytes).map_err(|error| error.to_string());
        }
    }
    Err(format!("it is an archive without {RECORD}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_left_in_a_log_or_a_manifest() {
        let log = "a line\n2026 TRACE h2: authorization: key-of-another\nkey-0123456789abcdef came\n";
        let text = clean(log, &["key-0123456789abcdef"]);
        assert_eq!(text, "a line\n(left out) came\n");
        let mut manifest = json!({"spec": {"router": {"pod": {"env": [{"name": "TOKEN", "value": "s3cret"}, {"name": "B", "secretName": "b"}]}}}});
        leave_out(&mut manifest);
        let text = manifest.to_string();
        assert!(
            !text.contains("s3cret") && text.contains("TOKEN") && text.contains("secretName"),
            "{text}"
        );
    }

    #[test]
    fn the_end_of_a_long_log_begins_within_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let line = format!("{}\n", "x".repeat(99));
        std::fs::write(&path, line.repeat(LOG_BYTES as usize / 100 + 50)).unwrap();
        let text = tail(&path).unwrap();
        assert!(text.len() as u64 <= LOG_BYTES && text.len() as u64 > LOG_BYTES - 200);
        assert!(text.lines().all(|line| line.len() == 99));
    }

    #[test]
    fn a_record_is_not_found_in_its_archive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("capture.tar");
        let mut files = Files::default();
        files.add("a.txt", b"a".to_vec());
        files.add("record.json", b"{}".to_vec());
        files.write(File::create(&path).unwrap()).unwrap();
        assert_eq!(record(File::open(&path).unwrap(), 100).unwrap(), b"{}");
        std::fs::write(&path, b"no archive").unwrap();
        assert!(record(File::open(&path).unwrap(), 100).is_err());
    }
}
