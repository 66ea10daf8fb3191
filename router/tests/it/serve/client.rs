//! A client of the OpenAI API.

use std::net::SocketAddr;

use futures::StreamExt;
use serde_json::{Value, json};

use super::PATIENCE;

#[derive(Clone)]
pub struct Client {
    pub http: reqwest::Client,
    base: String,
}

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: reqwest::header::HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The answer's text of a chat.
    pub fn content(&self) -> String {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    /// Checks OpenAI's error shape and gives the code.
    pub fn code(&self) -> String {
        let json = self.json();
        let error = json["error"]
            .as_object()
            .unwrap_or_else(|| panic!("no error in {}", self.text));
        for field in ["message", "type", "param", "code"] {
            assert!(error.contains_key(field), "no {field} in {}", self.text);
        }
        let code = error["code"].as_str().unwrap().to_owned();
        assert_eq!(self.header("x-tandem-error-code"), Some(code.as_str()));
        assert_eq!(self.header("x-request-id"), error["request_id"].as_str());
        code
    }

    pub fn param(&self) -> Option<String> {
        self.json()["error"]["param"].as_str().map(str::to_owned)
    }

    pub fn message(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap().to_owned()
    }
}

/// The events of a stream, comments aside.
#[derive(Debug, Default)]
pub struct Events {
    pub data: Vec<Value>,
    pub comments: usize,
    pub done: bool,
    /// The connection broke before the body's end.
    pub broken: bool,
}

impl Events {
    pub fn text(&self) -> String {
        let piece = |event: &Value| {
            let choice = &event["choices"][0];
            choice["delta"]["content"]
                .as_str()
                .or(choice["text"].as_str())
                .unwrap_or_default()
                .to_owned()
        };
        self.data.iter().map(piece).collect()
    }

    pub fn finish_reason(&self) -> Option<&str> {
        self.data
            .iter()
            .find_map(|event| event["choices"][0]["finish_reason"].as_str())
    }

    pub fn error(&self) -> Option<&Value> {
        self.data.iter().find_map(|event| event.get("error"))
    }

    pub fn usage(&self) -> Option<&Value> {
        self.data
            .iter()
            .find_map(|event| event.get("usage").filter(|usage| usage.is_object()))
    }

    /// Takes what is whole of `buffer`.
    fn take(&mut self, buffer: &mut String) {
        while let Some(end) = buffer.find("\n\n") {
            let frame: String = buffer.drain(..end + 2).collect();
            let frame = frame.trim_end();
            if frame.starts_with(':') {
                self.comments += 1;
                continue;
            }
            let data = frame
                .strip_prefix("data: ")
                .unwrap_or_else(|| panic!("not an event: {frame:?}"));
            assert!(!data.contains('\n'), "an event of several lines: {frame:?}");
            assert!(!self.done, "an event after [DONE]: {frame:?}");
            if data == "[DONE]" {
                self.done = true;
            } else {
                self.data
                    .push(serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}")));
            }
        }
    }
}

impl Client {
    pub fn new(addr: SocketAddr) -> Self {
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(PATIENCE * 3)
            .build()
            .unwrap();
        Self {
            http,
            base: format!("http://{addr}"),
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    pub async fn read(response: reqwest::Response) -> Answer {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Answer {
            status,
            headers,
            text: response.text().await.unwrap(),
        }
    }

    pub async fn get(&self, path: &str) -> Answer {
        Self::read(self.http.get(self.url(path)).send().await.unwrap()).await
    }

    pub fn post(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.http.post(self.url(path)).json(body)
    }

    pub async fn send(&self, path: &str, body: &Value) -> Answer {
        Self::read(self.post(path, body).send().await.unwrap()).await
    }

    /// A body that is sent as it stands.
    pub async fn raw(&self, path: &str, body: &'static str) -> Answer {
        let request = self
            .http
            .post(self.url(path))
            .header("content-type", "application/json")
            .body(body);
        Self::read(request.send().await.unwrap()).await
    }

    /// A chat with further fields.
    pub async fn chat(&self, extra: Value) -> Answer {
        self.send("/v1/chat/completions", &question(extra)).await
    }

    /// A streamed chat, once its head is there.
    pub async fn streaming(&self, extra: Value) -> reqwest::Response {
        let mut body = question(extra);
        body["stream"] = true.into();
        self.post("/v1/chat/completions", &body).send().await.unwrap()
    }

    /// A streamed chat to its end.
    pub async fn stream(&self, extra: Value) -> Events {
        let response = self.streaming(extra).await;
        assert_eq!(response.status(), 200);
        events(response).await
    }
}

/// Reads a stream to its end.
pub async fn events(response: reqwest::Response) -> Events {
    let mut body = response.bytes_stream();
    let (mut events, mut buffer, mut bytes) = (Events::default(), String::new(), Vec::new());
    while let Some(piece) = body.next().await {
        let Ok(piece) = piece else {
            events.broken = true;
            break;
        };
        bytes.extend_from_slice(&piece);
        if let Ok(text) = std::str::from_utf8(&bytes) {
            buffer.push_str(text);
            bytes.clear();
            events.take(&mut buffer);
        }
    }
    events
}

/// Reads a stream until its text has `wanted`; gives what still comes.
pub async fn until_text(
    response: reqwest::Response,
    wanted: &str,
) -> impl futures::Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin {
    let mut body = Box::pin(response.bytes_stream());
    let (mut events, mut buffer) = (Events::default(), String::new());
    let wait = async {
        while !events.text().contains(wanted) {
            let piece = body.next().await.expect("the stream ended").unwrap();
            buffer.push_str(std::str::from_utf8(&piece).unwrap());
            events.take(&mut buffer);
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the text never came");
    body
}

/// A chat request with further fields.
pub fn question(extra: Value) -> Value {
    let mut body = json!({
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    });
    if let (Value::Object(body), Value::Object(extra)) = (&mut body, extra) {
        body.extend(extra);
    }
    body
}
