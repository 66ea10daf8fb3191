//! Engines that stay, a router for each row, the load beside it, and what has to be there again afterwards.

use std::path::PathBuf;
use std::time::Duration;

use tandem_e2e::planting::{Door, completion};
use tandem_e2e::process::Process;
use tandem_e2e::stack::{Engine, Faults, Router};
use tandem_e2e::{eventually, free_port, probe, salted_text};
use tandem_wire::proto::admin_client::AdminClient;
use tandem_wire::proto::{Knobs, SetKnobsRequest};
use tokio_util::task::AbortOnDropHandle;

/// Of the admin ports; no log, record or archive may hold it.
pub const TOKEN: &str = "token-of-the-test-0123456789";
/// Of clients.
pub const KEY: &str = "key-of-the-test-0123456789";
/// No timer of the product ends what is planted before it was looked at.
const PATIENT: &[&str] = &[
    "--keepalive-interval-ms=5000",
    "--keepalive-timeout-ms=15000",
    "--rendezvous-ms=100000",
    "--progress-ms=100000",
    "--stall-ms=100000",
    "--lease-ms=100000",
    "--watchdog-ms=150000",
    "--drain-ms=0",
];
/// Of the engines' model: eight clients and the probes of two rows together must not starve one another.
pub const LAYERS: u32 = 2;
/// Clients that ask all the time.
const CLIENTS: u64 = 8;
/// For everything to be let go, on a busy machine.
pub const SETTLE: Duration = Duration::from_mins(1);

/// The engines.
pub struct Rig {
    pub prefill: Engine,
    pub prefill_faults: Faults,
    pub decode: Engine,
    pub decode_faults: Faults,
    decode_admin: String,
    folder: tempfile::TempDir,
    /// Of prefill and decode without a router.
    levels: [Levels; 2],
}

impl Rig {
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("token"), TOKEN).expect("a file");
        let (prefill_faults, decode_faults) = (Faults::none(), Faults::none());
        let decode_admin = format!("127.0.0.1:{}", free_port());
        let token = format!("--admin-token-file={}", folder.path().join("token").display());
        let admin = format!("--admin-listen={decode_admin}");
        let shallow = folder.path().join("model.gguf");
        tandem_e2e::shallow::shallow(&tandem_e2e::model(), LAYERS, &shallow);
        let shallow = format!("--model={}", shallow.display());
        let of_prefill = [PATIENT, &[shallow.as_str()]].concat();
        let of_decode = [of_prefill.as_slice(), &[admin.as_str(), token.as_str()]].concat();
        let (prefill, decode) = tokio::join!(
            Engine::start_with(&prefill_faults, "prefill", &of_prefill),
            Engine::start_with(&decode_faults, "decode", &of_decode)
        );
        let mut rig = Self {
            prefill,
            prefill_faults,
            decode,
            decode_faults,
            decode_admin,
            folder,
            levels: [Levels::ANY; 2],
        };
        let front = rig.front().await;
        let with_router = rig.levels_now().await;
        rig.settled(front).await;
        eventually("the router's connections are gone", SETTLE, async || {
            let now = rig.levels_now().await;
            let gone = |(now, with): (&Levels, &Levels)| now.tasks < with.tasks && now.fds < with.fds;
            let gone = now.iter().zip(&with_router).all(gone);
            if gone { Ok(()) } else { Err(format!("{now:?}")) }
        })
        .await;
        rig.levels = rig.levels_now().await;
        rig
    }

    /// Of prefill and decode.
    async fn levels_now(&self) -> [Levels; 2] {
        [
            Levels::of_engine(&self.prefill).await,
            Levels::of_engine(&self.decode).await,
        ]
    }

    pub fn token(&self) -> PathBuf {
        self.folder.path().join("token")
    }

    /// A router of its own, which has answered once.
    pub async fn front(&self) -> Front {
        let faults = Faults::none();
        let admin = format!("127.0.0.1:{}", free_port());
        let flags = [
            format!("--admin-listen={admin}"),
            format!("--admin-token-file={}", self.token().display()),
            "--client-stall-ms=120000".to_owned(),
            "--keepalive-interval-ms=5000".to_owned(),
            "--keepalive-timeout-ms=15000".to_owned(),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let router = Router::start_with(&faults, &[&self.prefill], &[&self.decode], &flags).await;
        let (status, body) = router.complete(&salted_text(1, 20), 2).await;
        assert_eq!(status, 200, "{body}");
        let door = Door {
            url: router.url(),
            admin,
            token: TOKEN.to_owned(),
            key: KEY.to_owned(),
            limit: SETTLE,
        };
        let mut front = Front {
            router,
            faults,
            door,
            levels: Levels::ANY,
        };
        front.door.unused(0).await;
        front.levels = front.levels_now().await;
        front
    }

    /// Decode takes so many sequences at once from now on.
    pub async fn set_max_running(&self, max_running: u32) {
        let client = AdminClient::connect(format!("http://{}", self.decode_admin)).await;
        let mut request = tonic::Request::new(SetKnobsRequest {
            boot_id: self.decode.info().await.boot_id,
            knobs: Some(Knobs {
                max_running: Some(max_running),
                ..Knobs::default()
            }),
        });
        let token = format!("Bearer {TOKEN}").parse().expect("a header");
        request.metadata_mut().insert("authorization", token);
        let told = client.expect("the admin port").set_knobs(request).await;
        told.expect("SetKnobs");
    }

    /// Pages, requests, hand-offs, streams, tasks and descriptors are what they were, of the engines and of the router, which ends.
    pub async fn settled(&self, mut front: Front) {
        tokio::join!(self.prefill.idle(SETTLE), self.decode.idle(SETTLE));
        for engine in [&self.prefill, &self.decode] {
            eventually("nothing is in flight", SETTLE, async || {
                let metrics = engine.metrics().await;
                let left = metrics.sum("tandem_engine_inflight", &[]) + metrics.sum("tandem_transfer_inflight", &[]);
                if left < 0.5 { Ok(()) } else { Err(left.to_string()) }
            })
            .await;
        }
        front.door.unused(0).await;
        eventually("the router is at its level", SETTLE, async || {
            let metrics = front.router.metrics().await;
            let requests = ["in_flight", "queue_depth", "at_engines", "upstream_in_flight"];
            let left = requests.map(|gauge| metrics.sum(&format!("tandem_router_{gauge}"), &[]));
            match front.levels_now().await.beyond(front.levels) {
                None if left.iter().all(|left| *left < 0.5) => Ok(()),
                None => Err(format!("{requests:?} {left:?}")),
                Some(beyond) => Err(beyond),
            }
        })
        .await;
        front.router.process.kill();
        for (engine, before) in [&self.prefill, &self.decode].into_iter().zip(self.levels) {
            eventually("an engine is at its level", SETTLE, async || {
                Levels::of_engine(engine).await.beyond(before).map_or(Ok(()), Err)
            })
            .await;
        }
    }
}

/// What a process holds.
#[derive(Debug, Clone, Copy)]
struct Levels {
    tasks: usize,
    fds: usize,
}

impl Levels {
    const ANY: Self = Self {
        tasks: usize::MAX,
        fds: usize::MAX,
    };

    async fn of_engine(engine: &Engine) -> Self {
        Self::of(&engine.process, &engine.metrics().await)
    }

    fn of(process: &Process, metrics: &probe::Metrics) -> Self {
        Self {
            tasks: metrics.sum("tandem_runtime_tasks", &[]) as usize,
            fds: process.fds(),
        }
    }

    /// What is more than `before`.
    fn beyond(self, before: Self) -> Option<String> {
        let beyond = self.tasks > before.tasks || self.fds > before.fds;
        beyond.then(|| format!("{self:?}, before {before:?}"))
    }
}

/// A router.
pub struct Front {
    pub router: Router,
    pub faults: Faults,
    pub door: Door,
    levels: Levels,
}

impl Front {
    async fn levels_now(&self) -> Levels {
        Levels::of(&self.router.process, &self.router.metrics().await)
    }

    /// Clients that ask one thing after the other until they are dropped.
    pub fn load(&self) -> Vec<AbortOnDropHandle<()>> {
        let client = |client: u64| {
            let url = format!("{}/v1/completions", self.door.url);
            AbortOnDropHandle::new(tokio::spawn(async move {
                let http = reqwest::Client::builder().no_proxy().build().expect("an HTTP client");
                for turn in 0.. {
                    // long, so that hardly ever none of them runs
                    let body = completion(10_000 + client * 1_000 + turn, 30, 1_500);
                    let answer = async {
                        http.post(&url)
                            .bearer_auth(KEY)
                            .json(&body)
                            .send()
                            .await?
                            .error_for_status()?
                            .bytes()
                            .await
                    };
                    if answer.await.is_err() {
                        // a stack that refuses is not asked without a pause
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                }
            }))
        };
        (0..CLIENTS).map(client).collect()
    }
}
