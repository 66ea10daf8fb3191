//! Ports of pods, forwarded by the API server: one stream for each connection.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt as _;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};

use super::connect::{Cluster, ClusterError, Need};
use crate::console::with_causes;

/// Pods by the places that their processes listen on.
#[derive(Clone)]
pub struct Pods {
    api: Api<Pod>,
    /// `HOST:PORT`, the host without brackets, to the pod's name.
    names: BTreeMap<(String, u16), String>,
}

impl fmt::Debug for Pods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pods")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Pods {
    pub fn new(api: Api<Pod>, names: BTreeMap<(String, u16), String>) -> Self {
        Self { api, names }
    }

    /// A connection to what listens there.
    pub async fn open(&self, host: &str, port: u16) -> Result<Forwarded> {
        let Some(pod) = self.names.get(&(host.to_owned(), port)) else {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("no pod of the deployment listens on {host}:{port}"),
            ));
        };
        let forward = self.api.portforward(pod, &[port]).await;
        let mut forward = forward.map_err(|error| Error::other(told(pod, port, &error)))?;
        let lost = || Error::other(format!("port {port} of pod {pod} was not forwarded"));
        let stream = forward.take_stream(port).ok_or_else(lost)?;
        let error = forward.take_error(port).ok_or_else(lost)?;
        Ok(Forwarded {
            stream,
            error: Some(error.boxed()),
        })
    }
}

/// Why no port of a pod can be forwarded, if none can: then nothing of it is measured, whatever its process does. Whether anybody
/// listens on the port does not matter.
///
/// # Errors
/// No port of any pod may be forwarded.
pub async fn hindrance(
    cluster: &Cluster,
    api: &Api<Pod>,
    pod: &str,
    port: u16,
) -> std::result::Result<Option<ClusterError>, ClusterError> {
    let need = Need::diagnose("create", "pods/portforward");
    match cluster.ask(need, api.portforward(pod, &[port])).await {
        Ok(_) => Ok(None),
        Err(error @ ClusterError::Forbidden { .. }) => Err(error),
        Err(error) => Ok(Some(error)),
    }
}

fn told(pod: &str, port: u16, error: &kube::Error) -> String {
    let why = match error {
        kube::Error::Api(status) => status.message.clone(),
        error => with_causes(error),
    };
    format!("port {port} of pod {pod} cannot be forwarded: {why}")
}

/// One connection. Whether anybody listens there is known only after it was opened: that nobody does is what the first read says.
pub struct Forwarded {
    stream: DuplexStream,
    error: Option<BoxFuture<'static, Option<String>>>,
}

impl fmt::Debug for Forwarded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Forwarded").finish_non_exhaustive()
    }
}

impl Forwarded {
    /// What the kubelet says of why there is no more, if it has said anything.
    fn refused(&mut self, cx: &mut Context<'_>) -> Option<Error> {
        let Poll::Ready(said) = self.error.as_mut()?.poll_unpin(cx) else {
            return None;
        };
        self.error = None;
        Some(Error::new(ErrorKind::ConnectionRefused, said?))
    }
}

impl AsyncRead for Forwarded {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            return read;
        }
        // What it says comes before the end of the stream, or instead of it.
        match this.refused(cx) {
            Some(error) => Poll::Ready(Err(error)),
            None => read,
        }
    }
}

impl AsyncWrite for Forwarded {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        // A stream that is closed already is broken for what the kubelet says, too.
        if let Poll::Ready(Err(_)) = &written
            && let Some(error) = this.refused(cx)
        {
            return Poll::Ready(Err(error));
        }
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
