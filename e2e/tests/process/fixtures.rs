//! The fixtures themselves: a relay that counts wrongly or a probe that reads nothing would prove nothing.

use std::net::SocketAddr;
use std::time::Duration;

use tandem_e2e::probe::Metrics;
use tandem_e2e::relay::Relay;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

#[test]
fn a_sum_takes_the_samples_with_the_labels_and_no_longer_name() {
    let text = "a_total{x=\"1\",y=\"2\"} 3\na_total{x=\"2\",y=\"2\"} 4\na_total_more 9\nb 5\n";
    let metrics = Metrics::from(text.to_owned());
    assert!((metrics.sum("a_total", &[]) - 7.0).abs() < 1e-9);
    assert!((metrics.sum("a_total", &["x=\"1\""]) - 3.0).abs() < 1e-9);
    assert!((metrics.sum("b", &[]) - 5.0).abs() < 1e-9);
}

#[test]
#[should_panic(expected = "no sample of c")]
fn a_wrong_name_is_no_zero() {
    Metrics::from("b 5\n".to_owned()).sum("c", &[]);
}

async fn sender(bytes: usize) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let _ = socket.write_all(&vec![7; bytes]).await;
        }
    });
    addr
}

#[tokio::test]
async fn counts_what_the_kernel_received_from_upstream() {
    let relay = Relay::start(sender(3_000_000).await).await;
    let mut bytes = Vec::new();
    let mut stream = TcpStream::connect(relay.addr()).await.expect("connect");
    stream.read_to_end(&mut bytes).await.expect("all bytes");
    assert_eq!(bytes.len(), 3_000_000);
    // Some kernels count the closing FIN as a byte.
    let received = relay.received_bytes();
    assert!((3_000_000..=3_000_001).contains(&received), "{received}");
}

#[tokio::test]
async fn stops_after_exactly_so_many_bytes_and_goes_on_when_released() {
    let relay = Relay::start(sender(3_000_000).await).await;
    relay.stop_after(1_234_567);
    let mut stream = TcpStream::connect(relay.addr()).await.expect("connect");
    let mut first = vec![0; 1_234_567];
    stream.read_exact(&mut first).await.expect("the bytes before the stop");
    relay.stopped().await;
    let mut one = [0];
    let more = timeout(Duration::from_millis(200), stream.read(&mut one)).await;
    assert!(more.is_err(), "a byte passed the stop");
    relay.release();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.expect("the bytes after it");
    assert_eq!(rest.len(), 3_000_000 - 1_234_567);
}
