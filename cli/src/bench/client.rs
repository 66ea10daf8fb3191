//! One request and what it measured.

use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::Request;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use serde::Deserialize;
use serde_json::{Value, json};
use tandem_secrets::Token;
use tokio::time::timeout;

use super::sse::Events;
use crate::http::{Answer, ConnectionId, Http, Trust, said};

/// An answer that is not a stream, an error for example, is read up to this.
const MAX_BODY: usize = 1024 * 1024;

/// The server under load.
#[derive(Debug, Clone)]
pub struct Server {
    http: Http,
    /// `authorization` of each request.
    key: Option<HeaderValue>,
    deadline: Duration,
}

/// What each request of a run asks for.
#[derive(Debug, Clone)]
pub struct Shape {
    pub model: String,
    pub output_tokens: u64,
    /// Ask for the whole length; not every server knows this field.
    pub ignore_eos: bool,
}

/// One completed request.
#[derive(Debug, Clone)]
pub struct Sample {
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    /// Until the first piece of text.
    pub first: Duration,
    /// Between pieces of text.
    pub gaps: Vec<Duration>,
    pub total: Duration,
    /// The answer.
    pub text: String,
    /// Our end of the connection that it came on: the same one twice is a connection that was reused.
    pub connection: Option<ConnectionId>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    finish_reason: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Delta {
    content: Option<String>,
}

impl Server {
    /// `url` with or without `/v1`; each request comes with `key` and has until `deadline`.
    pub fn new(url: &str, trust: Trust, key: Option<&Token>, deadline: Duration) -> Result<Self, String> {
        let key = key.map(|key| {
            let mut value = HeaderValue::try_from(key.authorization()).map_err(|error| error.to_string())?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        });
        Ok(Self {
            http: Http::new(url, trust)?,
            key: key.transpose()?,
            deadline,
        })
    }

    /// The same server, with no connection open yet.
    pub fn fresh(&self) -> Self {
        Self {
            http: self.http.fresh(),
            ..self.clone()
        }
    }

    pub fn url(&self) -> &str {
        self.http.url()
    }

    /// The first model that the server lists.
    pub async fn first_model(&self) -> Result<String, String> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            id: String,
        }
        let body = self
            .in_time(self.send("/v1/models", Request::get("/"), Vec::new()))
            .await?;
        let models: Models = serde_json::from_slice(&body).map_err(|error| format!("/v1/models: {error}"))?;
        models
            .data
            .into_iter()
            .next()
            .map(|model| model.id)
            .ok_or_else(|| "/v1/models lists no model".to_owned())
    }

    /// The server's count of a prompt's tokens.
    pub async fn count(&self, shape: &Shape, prompt: &str) -> Result<u64, String> {
        #[derive(Deserialize)]
        struct Whole {
            usage: Usage,
        }
        let one = Shape {
            output_tokens: 1,
            ..shape.clone()
        };
        let body = self.in_time(self.post(&one, &user(prompt), false)).await?;
        let whole: Whole = serde_json::from_slice(&body).map_err(|error| format!("no usage: {error}"))?;
        Ok(whole.usage.prompt_tokens)
    }

    /// One streamed request, to its end or to the deadline.
    pub async fn stream(&self, shape: &Shape, prompt: &str) -> Result<Sample, String> {
        match timeout(self.deadline, self.converse(shape, &user(prompt), |_| {})).await {
            Ok(result) => result,
            Err(_) => Err(format!("not complete after {} s", self.deadline.as_secs())),
        }
    }

    /// The answer to a conversation, streamed, however long it takes. `came` is told of each chunk's bytes.
    pub async fn converse(
        &self,
        shape: &Shape,
        messages: &Value,
        mut came: impl FnMut(usize),
    ) -> Result<Sample, String> {
        let began = Instant::now();
        let mut response = self.post(shape, messages, true).await?;
        let connection = response.connection;
        let mut events = Events::default();
        let mut state = Streamed::default();
        while let Some(chunk) = response.chunk().await.map_err(|error| error.to_string())? {
            came(chunk.len());
            let at = began.elapsed();
            let mut fault = None;
            let push = events.push(&chunk, |data| {
                if fault.is_none() {
                    fault = state.event(data, at).err();
                }
            });
            push.map_err(|error| error.to_string())?;
            if let Some(fault) = fault {
                return Err(fault);
            }
        }
        state.end(began.elapsed(), connection)
    }

    async fn post(&self, shape: &Shape, messages: &Value, stream: bool) -> Result<Answer, String> {
        let mut request = json!({
            "model": shape.model,
            "messages": messages,
            "max_tokens": shape.output_tokens,
            "temperature": 0,
            "stream": stream,
        });
        if stream {
            request["stream_options"] = json!({"include_usage": true});
        }
        if shape.ignore_eos {
            request["ignore_eos"] = json!(true);
        }
        let post = Request::post("/").header(CONTENT_TYPE, "application/json");
        self.send("/v1/chat/completions", post, request.to_string().into_bytes())
            .await
    }

    /// The answer, if its status says success; otherwise the server's own words.
    async fn send(&self, path: &str, request: hyper::http::request::Builder, body: Vec<u8>) -> Result<Answer, String> {
        let request = match &self.key {
            Some(key) => request.header(AUTHORIZATION, key),
            None => request,
        };
        let request = request.body(Full::from(body)).map_err(|error| error.to_string())?;
        let answer = self.http.send(path, request).await.map_err(|error| error.to_string())?;
        if answer.status.is_success() {
            return Ok(answer);
        }
        let status = answer.status.as_u16();
        Err(format!(
            "{status}: {}",
            said(&answer.whole(MAX_BODY).await.unwrap_or_default())
        ))
    }

    /// The whole of an answer that is no stream.
    async fn in_time(&self, answer: impl Future<Output = Result<Answer, String>>) -> Result<Vec<u8>, String> {
        let whole = async { answer.await?.whole(MAX_BODY).await.map_err(|error| error.to_string()) };
        timeout(self.deadline, whole)
            .await
            .map_err(|_| format!("not complete after {} s", self.deadline.as_secs()))?
    }
}

/// A conversation of one question.
fn user(prompt: &str) -> Value {
    json!([{"role": "user", "content": prompt}])
}

/// What a stream has brought so far.
#[derive(Debug, Default)]
struct Streamed {
    text: String,
    first: Option<Duration>,
    last: Duration,
    gaps: Vec<Duration>,
    usage: Option<Usage>,
    finished: bool,
    done: bool,
}

impl Streamed {
    fn event(&mut self, data: &str, at: Duration) -> Result<(), String> {
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_str(data).map_err(|error| format!("an event is no chunk: {error}"))?;
        if let Some(error) = chunk.error {
            return Err(format!("stream ended: {}", said(error.to_string().as_bytes())));
        }
        self.usage = chunk.usage.or(self.usage);
        for choice in chunk.choices {
            if let Some(content) = choice.delta.content.filter(|content| !content.is_empty()) {
                self.text.push_str(&content);
                match self.first {
                    None => self.first = Some(at),
                    Some(_) => self.gaps.push(at.saturating_sub(self.last)),
                }
                self.last = at;
            }
            self.finished |= choice.finish_reason.is_some();
        }
        Ok(())
    }

    /// Complete is only what said so: a finish reason, the usage and the end mark.
    fn end(self, total: Duration, connection: Option<ConnectionId>) -> Result<Sample, String> {
        if !self.done || !self.finished {
            return Err("stream was cut off: no finish reason and [DONE]".to_owned());
        }
        let usage = self
            .usage
            .ok_or("stream has no usage: the server ignores stream_options.include_usage")?;
        let first = self.first.ok_or("stream has no text")?;
        Ok(Sample {
            prompt_tokens: usage.prompt_tokens,
            output_tokens: usage.completion_tokens,
            first,
            gaps: self.gaps,
            total,
            text: self.text,
            connection,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn streamed(events: &[&str]) -> Result<Sample, String> {
        let mut state = Streamed::default();
        for (index, event) in events.iter().enumerate() {
            state.event(event, ms(10 * (index as u64 + 1)))?;
        }
        state.end(ms(1000), None)
    }

    const ROLE: &str = r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#;
    const A: &str = r#"{"choices":[{"delta":{"content":"a"}}],"usage":null}"#;
    const FINISH: &str = r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#;
    const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":30,"completion_tokens":2,"total_tokens":32}}"#;
    const DONE: &str = "[DONE]";

    #[test]
    fn the_first_token_is_the_first_text_and_not_the_role() {
        let sample = streamed(&[ROLE, A, A, FINISH, USAGE, DONE]).unwrap();
        assert_eq!(
            (sample.first, sample.gaps, sample.total),
            (ms(20), vec![ms(10)], ms(1000))
        );
        assert_eq!((sample.prompt_tokens, sample.output_tokens), (30, 2));
    }

    #[test]
    fn what_is_not_complete_counts_as_failed() {
        for (events, reason) in [
            (&[A, FINISH, USAGE][..], "cut off"),
            (&[A, USAGE, DONE][..], "cut off"),
            (&[][..], "cut off"),
            (&[A, FINISH, DONE][..], "no usage"),
            (&[ROLE, FINISH, USAGE, DONE][..], "no text"),
            (
                &[A, r#"{"error":{"message":"peer lost","code":"PEER_LOST"}}"#, DONE][..],
                "stream ended: peer lost",
            ),
            (&["<html>"][..], "no chunk"),
        ] {
            let error = streamed(events).unwrap_err();
            assert!(error.contains(reason), "{events:?}: {error}");
        }
    }
}
