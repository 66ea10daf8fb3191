//! `planted-proxy UPSTREAM FAULT CA`: a TLS-terminating keep-alive proxy with a fault, for tests.

use tandem_e2e::proxy::serve;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [upstream, plant, ca] = &args[..] else {
        return Err("usage: planted-proxy HOST:PORT FAULT CA-FILE".into());
    };
    match serve(upstream.parse()?, plant.parse()?, ca.as_ref()).await {}
}
