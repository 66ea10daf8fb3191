//! Persistent volume claims and secrets on one machine: each is a folder.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use tandem_crds::Model;

/// `--claim NAME=DIR`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimDir {
    pub claim: String,
    pub dir: PathBuf,
}

impl FromStr for ClaimDir {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((claim, dir)) if !claim.is_empty() && !dir.is_empty() => Ok(Self {
                claim: claim.to_owned(),
                dir: PathBuf::from(dir),
            }),
            _ => Err("write NAME=DIR, for example models=/data/models".to_owned()),
        }
    }
}

/// The key of a secret that holds the API's keys, and so the name of its file.
const API_KEYS: &str = "api-keys";

/// Why a claim's model or a secret's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error("neither XDG_DATA_HOME nor HOME is set: say where claim {claim:?} lies with --claim {claim}=DIR")]
    NoHome { claim: String },
    #[error("--claim {claim}={}: the manifest names no claim {claim:?} but {expected:?}", dir.display())]
    UnknownClaim {
        claim: String,
        dir: PathBuf,
        expected: String,
    },
    #[error(
        "no model file: the manifest names path {path:?} in claim {claim:?}, on this machine {}: {problem}; put the \
         model there, or say where the claim's files lie with --claim {claim}=DIR", file.display()
    )]
    NoFile {
        claim: String,
        path: String,
        file: PathBuf,
        problem: String,
    },
    #[error("neither XDG_DATA_HOME nor HOME is set: say where secret {secret:?} lies with --secret {secret}=DIR")]
    NoSecretHome { secret: String },
    #[error("--secret {secret}={}: spec.router.apiKeysSecretName is {expected:?}", dir.display())]
    UnknownSecret {
        secret: String,
        dir: PathBuf,
        expected: String,
    },
}

/// The model's file or folder on this machine; the file exists and holds bytes, the folder has the files that are needed. The
/// engine that loads them says whether they are the right ones.
pub fn find_model(model: &Model, claims: &[ClaimDir], data_home: Option<PathBuf>) -> Result<PathBuf, ClaimError> {
    let pvc = &model.source.pvc;
    if let Some(other) = claims.iter().find(|claim| claim.claim != pvc.claim_name) {
        return Err(ClaimError::UnknownClaim {
            claim: other.claim.clone(),
            dir: other.dir.clone(),
            expected: pvc.claim_name.clone(),
        });
    }
    let dir = match (claims.last(), data_home) {
        (Some(given), _) => given.dir.clone(),
        (None, Some(home)) => home.join("tandem/claims").join(&pvc.claim_name),
        (None, None) => {
            return Err(ClaimError::NoHome {
                claim: pvc.claim_name.clone(),
            });
        }
    };
    let file = std::path::absolute(dir.join(&pvc.path)).unwrap_or_else(|_| dir.join(&pvc.path));
    let problem = match std::fs::metadata(&file) {
        Ok(found) if found.is_dir() => missing(&file),
        Ok(found) if !found.is_file() => Some("it is neither a file nor a folder".to_owned()),
        Ok(found) if found.len() == 0 => Some("the file is empty".to_owned()),
        Ok(_) => std::fs::File::open(&file).err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    if let Some(problem) = problem {
        return Err(ClaimError::NoFile {
            claim: pvc.claim_name.clone(),
            path: pvc.path.clone(),
            file,
            problem,
        });
    }
    Ok(file)
}

/// The file of the API's keys in a secret of this name.
pub fn find_keys(name: &str, secrets: &[ClaimDir], data_home: Option<PathBuf>) -> Result<PathBuf, ClaimError> {
    if let Some(other) = secrets.iter().find(|secret| secret.claim != name) {
        return Err(ClaimError::UnknownSecret {
            secret: other.claim.clone(),
            dir: other.dir.clone(),
            expected: name.to_owned(),
        });
    }
    let dir = match (secrets.last(), data_home) {
        (Some(given), _) => given.dir.clone(),
        (None, Some(home)) => home.join("tandem/secrets").join(name),
        (None, None) => {
            return Err(ClaimError::NoSecretHome {
                secret: name.to_owned(),
            });
        }
    };
    Ok(dir.join(API_KEYS))
}

/// What a model's folder lacks.
fn missing(folder: &Path) -> Option<String> {
    let has = |name: &str| folder.join(name).is_file();
    let lacks = |what: &str| Some(format!("the folder has no {what}"));
    if !has("config.json") {
        return lacks("config.json (for a .gguf model name the file)");
    }
    if !has("tokenizer.json") {
        return lacks("tokenizer.json");
    }
    if !has("model.safetensors") && !has("model.safetensors.index.json") {
        return lacks("model.safetensors or model.safetensors.index.json");
    }
    None
}

/// Bytes of a model's weights: its file's, or those of the safetensors files in its folder.
pub fn model_bytes(path: &Path) -> u64 {
    let length = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
    if !path.is_dir() {
        return length(path);
    }
    let weights = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "safetensors");
    let files = std::fs::read_dir(path).into_iter().flatten().flatten();
    files
        .map(|entry| entry.path())
        .filter(weights)
        .map(|path| length(&path))
        .sum()
}

/// Lower-case hex digits.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// `variable`, or `HOME` with `below` added: the XDG rule for data and state folders.
pub fn xdg_dir(variable: &str, below: &str) -> Option<PathBuf> {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|value: &OsString| !value.is_empty())
            .map(PathBuf::from)
    };
    // A relative path in an XDG variable is to be ignored (XDG base directory specification 0.8).
    set(variable)
        .filter(|dir| dir.is_absolute())
        .or_else(|| set("HOME").map(|home| home.join(below)))
}

#[cfg(test)]
mod tests {
    use tandem_crds::{ModelSource, PvcSource};

    use super::*;

    fn model() -> Model {
        Model {
            name: "m".into(),
            source: ModelSource {
                pvc: PvcSource {
                    claim_name: "models".into(),
                    path: "sub/model.gguf".into(),
                },
            },
            revision: String::new(),
            max_length_tokens: None,
        }
    }

    fn claim(text: &str) -> Vec<ClaimDir> {
        vec![text.parse().unwrap()]
    }

    #[test]
    fn a_missing_file_names_claim_path_and_place() {
        let home = tempfile::tempdir().unwrap();
        let error = find_model(&model(), &[], Some(home.path().into()))
            .unwrap_err()
            .to_string();
        let place = home.path().join("tandem/claims/models/sub/model.gguf");
        for part in [
            "\"models\"",
            "\"sub/model.gguf\"",
            place.to_str().unwrap(),
            "--claim models=DIR",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let error = find_model(&model(), &claim("models=/nowhere"), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("/nowhere/sub/model.gguf"), "{error}");
        assert!(
            find_model(&model(), &[], None)
                .unwrap_err()
                .to_string()
                .contains("--claim models=DIR")
        );
    }

    #[test]
    fn a_claim_that_the_manifest_does_not_name_is_refused() {
        let error = find_model(&model(), &claim("model=/data"), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("no claim \"model\" but \"models\""), "{error}");
        assert!("models".parse::<ClaimDir>().unwrap_err().contains("NAME=DIR"));
        assert!("=x".parse::<ClaimDir>().is_err());
    }

    #[test]
    fn the_keys_of_a_secret_lie_in_its_folder() {
        let home = Some(PathBuf::from("/home"));
        let keys = |secrets: &[ClaimDir], home| find_keys("front", secrets, home).map_err(|error| error.to_string());
        assert_eq!(
            keys(&[], home.clone()).unwrap(),
            Path::new("/home/tandem/secrets/front/api-keys")
        );
        assert_eq!(
            keys(&claim("front=/run/s"), None).unwrap(),
            Path::new("/run/s/api-keys")
        );
        assert!(
            keys(&claim("other=/run/s"), home)
                .unwrap_err()
                .contains("apiKeysSecretName is \"front\"")
        );
        assert!(keys(&[], None).unwrap_err().contains("--secret front=DIR"));
    }

    #[test]
    fn an_empty_file_is_a_model() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        let file = dir.path().join("sub/model.gguf");
        let claims = claim(&format!("models={}", dir.path().display()));
        std::fs::write(&file, "").unwrap();
        assert!(
            find_model(&model(), &claims, None)
                .unwrap_err()
                .to_string()
                .contains("the file is empty")
        );
        std::fs::write(&file, "abc").unwrap();
        assert_eq!(find_model(&model(), &claims, None).unwrap(), file);
    }

    #[test]
    fn a_model_may_be_a_folder_with_all_that_is_needed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("sub/model.gguf");
        std::fs::create_dir_all(&folder).unwrap();
        let claims = claim(&format!("models={}", dir.path().display()));
        let find = || find_model(&model(), &claims, None);
        for (file, content) in [
            ("config.json", "{}"),
            ("tokenizer.json", "{\"version\":\"1.0\"}"),
            ("model.safetensors", "12345678"),
        ] {
            let error = find().unwrap_err().to_string();
            assert!(error.contains(&format!("the folder has no {file}")), "{error}");
            std::fs::write(folder.join(file), content).unwrap();
        }
        assert_eq!(find().unwrap(), folder);
        assert_eq!(model_bytes(&folder), 8);
        std::fs::rename(folder.join("model.safetensors"), folder.join("a.safetensors")).unwrap();
        assert!(find().unwrap_err().to_string().contains("model.safetensors.index.json"));
        std::fs::write(folder.join("model.safetensors.index.json"), "{}").unwrap();
        std::fs::write(folder.join("b.safetensors"), "123").unwrap();
        assert_eq!(find().unwrap(), folder);
        assert_eq!(model_bytes(&folder), 11);
    }
}
