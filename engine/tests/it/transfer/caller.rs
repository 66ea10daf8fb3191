//! A decode spoken by hand.

use bytes::Bytes;
use tandem_wire::proto::kv_transfer_client::KvTransferClient;
use tandem_wire::proto::{self, DecodeMessage, Open, PrefillMessage, decode_message, prefill_message};
use tandem_wire::{BootId, Failure, Source, TransferKey};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

use super::pull::prompt;
use super::rig::{Prefill, soon};

pub async fn channel(addr: std::net::SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{addr}"))
        .unwrap()
        .connect()
        .await
        .unwrap()
}

/// One control stream, spoken by hand.
pub struct Caller {
    pub say: mpsc::Sender<DecodeMessage>,
    pub hear: Streaming<PrefillMessage>,
}

impl Caller {
    pub async fn call(prefill: &Prefill) -> Self {
        let (say, said) = mpsc::channel(16);
        let mut client = KvTransferClient::new(channel(prefill.control).await);
        let hear = client.prefill(ReceiverStream::new(said)).await.unwrap().into_inner();
        Self { say, hear }
    }

    pub async fn open(prefill: &Prefill, open: Open) -> Self {
        let caller = Self::call(prefill).await;
        caller.say(decode_message::Message::Open(open)).await;
        caller
    }

    pub async fn say(&self, message: decode_message::Message) {
        let message = Some(message);
        self.say.send(DecodeMessage { message }).await.unwrap();
    }

    pub async fn commit(&self) {
        self.say(decode_message::Message::Commit(proto::Commit {})).await;
    }

    /// The next word; `None` when prefill has ended the stream.
    pub async fn hear(&mut self) -> Option<prefill_message::Message> {
        let message = soon("a word from prefill", self.hear.message()).await.unwrap();
        message.map(|m| m.message.unwrap())
    }

    /// The next word that is neither a queue place nor progress.
    pub async fn news(&mut self) -> Option<prefill_message::Message> {
        loop {
            match self.hear().await {
                Some(prefill_message::Message::Queued(_) | prefill_message::Message::Progress(_)) => {}
                news => return news,
            }
        }
    }

    pub async fn accepted(&mut self) -> proto::Accepted {
        match self.news().await {
            Some(prefill_message::Message::Accepted(accepted)) => accepted,
            other => panic!("{other:?} instead of Accepted"),
        }
    }

    pub async fn manifest(&mut self) -> proto::Manifest {
        match self.news().await {
            Some(prefill_message::Message::Manifest(manifest)) => manifest,
            other => panic!("{other:?} instead of the manifest"),
        }
    }

    pub async fn failed(&mut self) -> Failure {
        match self.news().await {
            Some(prefill_message::Message::Failed(failure)) => Failure::from_wire(&failure),
            other => panic!("{other:?} instead of a failure"),
        }
    }

    pub async fn released(&mut self) {
        let news = self.news().await;
        assert!(
            matches!(news, Some(prefill_message::Message::Released(_))),
            "{news:?} instead of Released"
        );
    }
}

pub const DECODE: [u8; 16] = [0xDE; 16];

pub fn open(prefill: &Prefill, key: TransferKey) -> Open {
    let spec = prefill.scheduler.spec();
    Open {
        key: Some(key.to_wire()),
        prefill_boot_id: prefill.boot_id.to_wire(),
        decode_boot_id: BootId::from(DECODE).to_wire(),
        model_hash: Bytes::copy_from_slice(&spec.hash),
        layout: Some(spec.layout.to_wire()),
        prompt_tokens: prompt(1, 100),
        have_tokens: 0,
        sampling: None,
        stop_token_ids: vec![],
        ignore_eos: true,
        max_new_tokens: 8,
        remaining_ms: 0,
        request_id: "test".to_owned(),
        transports: vec!["grpc".to_owned()],
    }
}

pub fn fetch_request(prefill: &Prefill, key: TransferKey) -> proto::FetchRequest {
    proto::FetchRequest {
        key: Some(key.to_wire()),
        boot_id: prefill.boot_id.to_wire(),
        decode_boot_id: BootId::from(DECODE).to_wire(),
        rank: 0,
        lane: 0,
    }
}

pub async fn fetch(prefill: &Prefill, request: proto::FetchRequest) -> Result<Vec<proto::Frame>, Failure> {
    let mut client = KvTransferClient::new(channel(prefill.data).await);
    let read = async {
        let mut stream = client.fetch(request).await?.into_inner();
        let mut frames = Vec::new();
        while let Some(frame) = stream.message().await? {
            frames.push(frame);
        }
        Ok::<_, Status>(frames)
    };
    soon("frames", read)
        .await
        .map_err(|status| Failure::from_status(&status, Source::Decode))
}
