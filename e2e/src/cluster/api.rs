//! A client of the API server: plain HTTP to a `kubectl proxy`, which adds the user's token and TLS.

use std::fmt;
use std::marker::PhantomData;

use futures::{Stream, StreamExt};
use k8s_openapi::{Metadata, Resource, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use reqwest::{Method, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Calls as one user.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
}

/// What the API server says of a request that it refuses.
#[derive(Debug, Clone)]
pub struct Refused {
    /// The HTTP status.
    pub code: u16,
    /// Its `Status` object.
    pub status: Value,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = self.status["message"].as_str();
        write!(f, "{}: {}", self.code, message.unwrap_or("no message"))
    }
}

/// An answer, or a refusal.
pub type Answer<T> = Result<T, Refused>;

/// How a patch is meant.
#[derive(Debug, Clone, Copy)]
pub enum Patch<'a> {
    /// RFC 7386: a list is replaced.
    Merge,
    /// A list's items are merged by their key.
    Strategic,
    /// All that this manager wants of the object; it is made if it is not there.
    Apply(&'a str),
}

impl Client {
    /// By the address of a proxy, for example `http://127.0.0.1:8001`.
    pub fn new(base: String) -> Self {
        Self {
            http: reqwest::Client::new(),
            base,
        }
    }

    async fn send(&self, method: Method, path: &str, content: &str, body: Option<&Value>) -> Answer<Response> {
        let mut request = self.http.request(method.clone(), format!("{}{path}", self.base));
        if let Some(body) = body {
            request = request.header("content-type", content).body(body.to_string());
        }
        let response = request
            .send()
            .await
            .unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        if response.status().is_success() {
            return Ok(response);
        }
        let code = response.status().as_u16();
        let text = response.text().await.unwrap_or_default();
        let status = serde_json::from_str(&text).unwrap_or_else(|_| json!({"message": text}));
        Err(Refused { code, status })
    }

    /// One request with a JSON body.
    ///
    /// # Panics
    /// When the API server cannot be reached, or answers with something else than JSON.
    pub async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Answer<Value> {
        let response = self.send(method, path, "application/json", body).await?;
        Ok(response.json().await.expect("an answer in JSON"))
    }
}

/// Objects of one kind, in one namespace or in none.
#[derive(Debug, Clone)]
pub struct Api<K> {
    client: Client,
    path: String,
    kind: PhantomData<fn() -> K>,
}

impl<K: Resource + Metadata<Ty = ObjectMeta> + Serialize + DeserializeOwned> Api<K> {
    /// Of a kind without namespaces, or of all of them.
    pub fn all(client: &Client) -> Self {
        Self::of(client, "")
    }

    /// Of one namespace.
    pub fn namespaced(client: &Client, namespace: &str) -> Self {
        Self::of(client, &format!("namespaces/{namespace}/"))
    }

    fn of(client: &Client, scope: &str) -> Self {
        Self::at(client, &path(K::API_VERSION, scope, K::URL_PATH_SEGMENT))
    }
}

impl<K: Serialize + DeserializeOwned> Api<K> {
    /// Of a kind that is known by its path only.
    pub fn at(client: &Client, path: &str) -> Self {
        Self {
            client: client.clone(),
            path: path.to_owned(),
            kind: PhantomData,
        }
    }

    async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Answer<K> {
        let answer = self.client.call(method, path, body).await?;
        Ok(serde_json::from_value(answer).expect("an object of this kind"))
    }

    /// Makes an object.
    pub async fn create(&self, object: &K) -> Answer<K> {
        self.call(Method::POST, &self.path, Some(&value(object))).await
    }

    /// Reads one.
    pub async fn get(&self, name: &str) -> Answer<K> {
        self.call(Method::GET, &format!("{}/{name}", self.path), None).await
    }

    /// Reads those with such labels, for example `a=b,c=d`; all with none.
    pub async fn list(&self, labels: &str) -> Vec<K> {
        let path = format!("{}?labelSelector={labels}", self.path);
        let answer = self.client.call(Method::GET, &path, None).await;
        let mut list = answer.unwrap_or_else(|refused| panic!("{path}: {refused}"));
        serde_json::from_value(list["items"].take()).expect("objects of this kind")
    }

    /// Changes one.
    pub async fn patch(&self, name: &str, how: Patch<'_>, patch: &Value) -> Answer<K> {
        self.patch_at(name, how, patch).await
    }

    /// Changes the status of one.
    pub async fn patch_status(&self, name: &str, how: Patch<'_>, patch: &Value) -> Answer<K> {
        self.patch_at(&format!("{name}/status"), how, patch).await
    }

    async fn patch_at(&self, name: &str, how: Patch<'_>, patch: &Value) -> Answer<K> {
        let (content, query) = match how {
            Patch::Merge => ("application/merge-patch+json", String::new()),
            Patch::Strategic => ("application/strategic-merge-patch+json", String::new()),
            Patch::Apply(manager) => (
                "application/apply-patch+yaml",
                format!("?fieldManager={manager}&force=true"),
            ),
        };
        let path = format!("{}/{name}{query}", self.path);
        let response = self.client.send(Method::PATCH, &path, content, Some(patch)).await?;
        Ok(response.json().await.expect("an object of this kind"))
    }

    /// Deletes one; `options` are a `DeleteOptions`.
    pub async fn delete(&self, name: &str, options: &Value) -> Answer<Value> {
        let path = format!("{}/{name}", self.path);
        self.client.call(Method::DELETE, &path, Some(options)).await
    }

    /// What is there, and the version of the list.
    pub async fn snapshot(&self, query: &str) -> Answer<(Vec<K>, String)> {
        let mut list = self
            .client
            .call(Method::GET, &format!("{}?{query}", self.path), None)
            .await?;
        let version = list["metadata"]["resourceVersion"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let items = serde_json::from_value(list["items"].take()).expect("objects of this kind");
        Ok((items, version))
    }

    /// What happens after a version: the type and object of each event. It ends when the API server ends it.
    pub async fn watch(&self, query: &str, version: &str) -> Answer<impl Stream<Item = (String, K)> + use<K>> {
        let path = format!("{}?{query}&watch=true&resourceVersion={version}", self.path);
        let response = self.client.send(Method::GET, &path, "", None).await?;
        let mut bytes = response.bytes_stream().boxed();
        Ok(async_stream::stream! {
            let mut buffer = Vec::new();
            while let Some(Ok(more)) = bytes.next().await {
                buffer.extend_from_slice(&more);
                while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = buffer.drain(..=end).collect();
                    let mut event: Value = serde_json::from_slice(&line).expect("an event");
                    let kind = event["type"].as_str().unwrap_or_default().to_owned();
                    // An error says that the version is too old: the stream ends.
                    let Ok(object) = serde_json::from_value(event["object"].take()) else { return };
                    yield (kind, object);
                }
            }
        })
    }
}

/// The path of a kind's objects; `scope` is empty or `namespaces/NAME/`.
pub fn path(api_version: &str, scope: &str, plural: &str) -> String {
    let root = if api_version.contains('/') { "apis" } else { "api" };
    format!("/{root}/{api_version}/{scope}{plural}")
}

fn value(object: impl Serialize) -> Value {
    serde_json::to_value(object).expect("an object is JSON")
}
