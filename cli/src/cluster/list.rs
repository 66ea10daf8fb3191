//! All deployments of a namespace, or of all, in the columns that the API server has for them.

use std::io::Write as _;
use std::process::ExitCode;

use hyper::Request;
use hyper::header::ACCEPT;
use kube::Resource as _;
use serde::Deserialize;
use serde_json::Value;
use tandem_crds::PDDeployment;

use super::connect::{Cluster, ClusterError, Need, RESOURCE};
use super::table::columns;
use crate::console;

/// What the API server prints for `kubectl get`.
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

/// How to show them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    Columns,
    /// With those that are left out else.
    Wide,
    Json,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Table {
    column_definitions: Vec<Column>,
    /// Null for none.
    rows: Option<Vec<Row>>,
}

#[derive(Debug, Deserialize)]
struct Column {
    name: String,
    priority: i32,
}

#[derive(Debug, Deserialize)]
struct Row {
    cells: Vec<Value>,
    object: Value,
}

/// Shows them.
pub async fn list(cluster: &Cluster, all: bool, shown: Shown) -> Result<ExitCode, ClusterError> {
    let accept = if shown == Shown::Json {
        "application/json"
    } else {
        TABLE
    };
    let namespace = (!all).then_some(cluster.namespace.as_str());
    let url = PDDeployment::url_path(&(), namespace);
    let request = Request::get(url).header(ACCEPT, accept).body(Vec::new());
    let request = request.map_err(|error| ClusterError::Client(error.to_string()))?;
    let answer: Value = cluster
        .ask(Need::view("list", RESOURCE), cluster.client.request(request))
        .await?;
    let text = if shown == Shown::Json {
        json(answer)
    } else {
        let table = Table::deserialize(answer).map_err(|error| ClusterError::Client(error.to_string()))?;
        let rows = table.rows.as_deref().unwrap_or_default();
        if rows.is_empty() {
            let place = namespace.map_or_else(String::new, |namespace| format!(" in {namespace} namespace"));
            console::note(&format!("no PDDeployments found{place}"));
            return Ok(ExitCode::SUCCESS);
        }
        columns("", &lines(&table.column_definitions, rows, all, shown == Shown::Wide))
    };
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(ExitCode::SUCCESS)
}

fn lines(definitions: &[Column], rows: &[Row], all: bool, wide: bool) -> Vec<Vec<String>> {
    let is_shown = |column: &Column| wide || column.priority == 0;
    let first = |text: &str| all.then(|| text.to_owned());
    let names = definitions.iter().filter(|column| is_shown(column));
    let head = first("NAMESPACE")
        .into_iter()
        .chain(names.map(|column| column.name.to_uppercase()));
    let line = |row: &Row| {
        let namespace = row.object["metadata"]["namespace"].as_str().unwrap_or_default();
        let cells = row.cells.iter().zip(definitions).filter(|(_, column)| is_shown(column));
        first(namespace)
            .into_iter()
            .chain(cells.map(|(cell, _)| text(cell)))
            .collect()
    };
    std::iter::once(head.collect()).chain(rows.iter().map(line)).collect()
}

fn text(cell: &Value) -> String {
    match cell {
        Value::Null => "<none>".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// As it is, without who set which field.
fn json(mut answer: Value) -> String {
    for item in answer["items"].as_array_mut().into_iter().flatten() {
        if let Some(metadata) = item["metadata"].as_object_mut() {
            metadata.remove("managedFields");
        }
    }
    serde_json::to_string_pretty(&answer).unwrap_or_default() + "\n"
}
