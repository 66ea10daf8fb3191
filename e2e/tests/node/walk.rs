//! What a newcomer types.

use std::process::Command;

use serde_json::Value;
use tandem_e2e::cluster::api::Api;
use tandem_e2e::node::{self, outcome};
use tandem_e2e::probe::Metrics;

const NAMESPACE: &str = "serving";

/// OpenAI's own client, streamed and not.
const CHAT: &str = r#"
import os, openai
client = openai.OpenAI(base_url=os.environ["URL"], api_key="none", timeout=120)
ask = dict(model="smollm2-135m-instruct", max_tokens=32, temperature=0, messages=[
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
])
whole = client.chat.completions.create(**ask).choices[0].message.content
pieces = "".join(piece.choices[0].delta.content or "" for piece in client.chat.completions.create(**ask, stream=True) if piece.choices)
assert whole == pieces, (whole, pieces)
print(whole)
"#;

#[test]
fn the_example_serves_the_openai_sdk_with_kv_moved_between_two_nodes() {
    node::test(async |nodes| {
        nodes.install();
        let example = tandem_e2e::root()
            .join("examples/smollm2-cluster.yaml")
            .display()
            .to_string();
        nodes.kubectl(&["apply", "--namespace", NAMESPACE, "--filename", &example], "");
        nodes.kubectl(
            &[
                "wait",
                "--namespace",
                NAMESPACE,
                "--for=condition=Ready",
                "pdd/smollm2",
                "--timeout=4m",
            ],
            "",
        );
        let shown = nodes.kubectl(&["get", "pdd", "--namespace", NAMESPACE], "");
        assert!(shown.contains("True"), "{shown}");

        let pods: Api<Value> = Api::at(&nodes.admin(), &format!("/api/v1/namespaces/{NAMESPACE}/pods"));
        let pods = pods.list("tandem.dev/deployment=smollm2").await;
        let of = |role: &str| {
            pods.iter()
                .find(|pod| pod["metadata"]["labels"]["tandem.dev/role"] == role)
                .expect("a pod")
        };
        assert_ne!(of("prefill")["spec"]["nodeName"], of("decode")["spec"]["nodeName"]);

        let decode = format!("pod/{}", of("decode")["metadata"]["name"].as_str().expect("a name"));
        let ops = nodes.forward(NAMESPACE, &decode, 7102);
        let moved = async || {
            Metrics::of(&ops.address)
                .await
                .sum("tandem_transfer_bytes_total", &["side=\"decode\""])
        };
        let before = moved().await;
        let front = nodes.forward(NAMESPACE, "service/smollm2", 80);
        let python = tandem_e2e::root().join(".venv/bin/python");
        let said = outcome(
            Command::new(python)
                .args(["-c", CHAT])
                .env("URL", format!("http://{}/v1", front.address))
                .env("NO_PROXY", "*"),
            "",
        );
        let answer = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        assert!(answer.contains("Paris"), "{answer}");
        assert!(moved().await > before, "no KV was moved");
        nodes.kubectl(
            &["delete", "pdd", "smollm2", "--namespace", NAMESPACE, "--timeout=4m"],
            "",
        );
    });
}
