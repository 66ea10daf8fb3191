//! Compiles a request's grammar, off every thread that others wait for.

use std::sync::Arc;
use std::time::Duration;

use tandem_wire::{Reason, proto};
use tokio::sync::Semaphore;

use super::seq::Stops;
use crate::exec::ModelSpec;
use crate::sample::grammar::{Grammar, MAX_SCHEMA_BYTES};

/// Schemas that compile at once; each takes a core.
static COMPILERS: Semaphore = Semaphore::const_new(2);
/// One that waits or compiles for longer is refused. Its own limits end a compilation long before that.
const PATIENCE: Duration = Duration::from_secs(10);

/// The grammar that sampling asks for, compiled.
///
/// # Errors
/// INVALID: there is none for this model, or no answer can be held to it; NO_CAPACITY: too many compile now.
pub async fn compile_grammar(
    spec: &ModelSpec,
    sampling: Option<&proto::Sampling>,
    stops: &Stops,
) -> Result<Option<Arc<Grammar>>, (Reason, String)> {
    let Some(grammar) = sampling.and_then(|s| s.grammar.as_ref()) else {
        return Ok(None);
    };
    let invalid = |why: String| (Reason::Invalid, why);
    let Some(proto::grammar::Kind::JsonSchema(schema)) = &grammar.kind else {
        return Err(invalid(
            "sampling.grammar is of a kind that this engine does not know".to_owned(),
        ));
    };
    if schema.len() > MAX_SCHEMA_BYTES {
        return Err(invalid(format!(
            "response_format's schema has {} bytes, allowed are {MAX_SCHEMA_BYTES}",
            schema.len()
        )));
    }
    let vocabulary = spec.vocabulary.as_ref().map_err(|why| {
        invalid(format!(
            "response_format's schema cannot be held to by this model: {why}"
        ))
    })?;
    if stops.ending(&spec.end_tokens).next().is_none() {
        return Err(invalid(
            "response_format's schema needs a token that ends the answer; leave ignore_eos out or name a stop token"
                .to_owned(),
        ));
    }
    let refused = |why: String| invalid(format!("response_format's schema is refused: {why}"));
    if let Some(kept) = vocabulary.kept(schema) {
        return Ok(Some(kept));
    }
    let Ok(Ok(permit)) = tokio::time::timeout(PATIENCE, COMPILERS.acquire()).await else {
        let why = format!(
            "too many schemas compile, this one waited {} s; try again later",
            PATIENCE.as_secs()
        );
        return Err((Reason::NoCapacity, why));
    };
    let (vocabulary, schema) = (Arc::clone(vocabulary), schema.clone());
    let compiled = tokio::task::spawn_blocking(move || {
        // given back when the work ends, not when its request does
        let _permit = permit;
        vocabulary.compile(&schema)
    });
    match tokio::time::timeout(PATIENCE, compiled).await {
        Ok(Ok(compiled)) => compiled.map(Some).map_err(refused),
        Ok(Err(_)) => Err(refused("it broke the compiler".to_owned())),
        Err(_) => Err(refused(format!(
            "it takes more than {} s to compile",
            PATIENCE.as_secs()
        ))),
    }
}
