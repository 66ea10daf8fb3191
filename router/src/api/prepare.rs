//! From a body to what the engines are asked for. Template and tokenizer run on blocking threads, as many at once as there are
//! cores: a long prompt delays nobody's tokens.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Semaphore;

use super::fields::Prompt;
use super::request::{ChatBody, Common, CompletionBody};
use super::sampling::sampling;
use super::tools::Tools;
use crate::error::RouterError;
use crate::flow::Spec;
use crate::flow::spec::{Asker, fit};
use crate::knobs::Knobs;
use crate::metrics::{Endpoint, Metrics, Phase};
use crate::text::stop::StopScanner;
use crate::text::{ChatInput, Text};

/// Prompts of one request.
const MAX_PROMPTS: usize = 64;
/// Answers of one request, to all its prompts together; OpenAI takes as many to one.
const MAX_CHOICES: usize = 128;
/// More ids than any model has ends.
const MAX_STOP_TOKENS: usize = 128;
/// What `/v1/completions` gives where nothing is said, as OpenAI does. A chat gets as many tokens as fit.
const DEFAULT_COMPLETION_TOKENS: u32 = 16;

/// A normalizer may make a text shorter before it is cut into tokens (NFC: three bytes of three become one character).
const SHRINKS: usize = 4;

/// What requests are checked against.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The one model's name.
    pub model: String,
    /// Longest prompt with answer, as far as is known.
    pub max_length_tokens: Option<u32>,
    /// What is in force.
    pub knobs: Knobs,
}

impl Limits {
    /// Is it the one model?
    pub(super) fn check_model(&self, asked: &str) -> Result<(), RouterError> {
        if asked == self.model {
            return Ok(());
        }
        Err(RouterError::UnknownModel {
            asked: asked.to_owned(),
            served: self.model.clone(),
        })
    }
}

/// Where the request came from.
#[derive(Debug, Clone)]
pub struct Origin {
    /// Its id.
    pub request_id: String,
    /// When it came.
    pub came: Instant,
    /// Who asks.
    pub asker: Asker,
}

/// A request ready to run.
#[derive(Debug)]
pub struct Prepared {
    /// One for each prompt.
    pub specs: Vec<Spec>,
    /// So many answers to each.
    pub n: usize,
    /// Piece by piece.
    pub stream: bool,
    /// With the usage as last chunk.
    pub include_usage: bool,
    /// An answer may have more than one call.
    pub parallel_calls: bool,
}

/// Runs template and tokenizer.
#[derive(Debug)]
pub struct TextWork {
    text: Arc<Text>,
    slots: Arc<Semaphore>,
    metrics: Arc<Metrics>,
    longest_token_bytes: usize,
}

impl TextWork {
    /// As many at once as there are cores.
    pub fn new(text: Arc<Text>, metrics: Arc<Metrics>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let vocabulary = text.vocabulary();
        let longest = (0..vocabulary.len() as u32)
            .filter_map(|id| Some(vocabulary.token(id).ok()?.0.len()))
            .max();
        Self {
            longest_token_bytes: longest.unwrap_or(1).max(1),
            text,
            slots: Arc::new(Semaphore::new(cores)),
            metrics,
        }
    }

    /// Refuses a text that is too long whatever its tokens are: tokenizing 8 MiB takes seconds of a core.
    pub(super) fn bound(
        &self,
        limits: &Limits,
        endpoint: Endpoint,
    ) -> impl Fn(&str) -> Result<(), RouterError> + Send + 'static {
        let (longest, max) = (self.longest_token_bytes, limits.max_length_tokens);
        move |text| {
            let least = text.len() / longest / SHRINKS;
            match max {
                Some(max) if least > max as usize => {
                    let param = endpoint.prompt_field();
                    Err(RouterError::ContextLength {
                        param,
                        detail: format!(
                            "this model takes at most {max} tokens, answer included, but the {param} have at least {least} \
                             tokens; shorten them"
                        ),
                    })
                }
                _ => Ok(()),
            }
        }
    }

    /// Runs `work` where it delays nobody, until the request's time is over.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        deadline: Instant,
        asker: Asker,
        limits: &Limits,
        work: impl FnOnce(&Text) -> Result<T, RouterError> + Send + 'static,
    ) -> Result<T, RouterError> {
        let came = Instant::now();
        let done = async {
            let slot = Arc::clone(&self.slots).acquire_owned().await;
            let text = Arc::clone(&self.text);
            tokio::task::spawn_blocking(move || {
                // a client that left does not stop the thread, so the slot stays taken until it is done
                let _slot = slot;
                #[cfg(feature = "faults")]
                tandem_faults::pass(tandem_faults::Fault::DelayTokenization);
                work(&text)
            })
            .await
        };
        let done = tokio::time::timeout_at(deadline.into(), done)
            .await
            .map_err(|_| RouterError::Deadline(limits.knobs.request()))?
            .map_err(|error| RouterError::Internal(format!("template or tokenizer failed: {error}")))?;
        if asker != Asker::Diagnosis {
            self.metrics.phase(Phase::Text, came.elapsed().as_secs_f64());
        }
        done
    }

    /// Prepares `/v1/chat/completions`.
    pub async fn chat(&self, body: ChatBody, limits: &Limits, origin: Origin) -> Result<Prepared, RouterError> {
        let common = Common {
            logprobs: body.scores()?,
            ..body.common()
        };
        let mut template = Template::check(common, limits, origin, Endpoint::Chat, self.text.vocabulary().len())?;
        if body.messages.as_ref().is_none_or(Vec::is_empty) {
            return Err(RouterError::field("messages", "give at least one message"));
        }
        let tools = Tools::read(&body, self.text.tool_format())?;
        template.spec.calls = tools.format;
        if tools.grammar.is_some() {
            template.spec.sampling.grammar = tools.grammar;
        }
        let shown = tools.shown;
        let (n, stream, include_usage) = (template.n, template.stream, template.include_usage);
        let parallel_calls = body.parallel_tool_calls.unwrap_or(true);
        let bound = self.bound(limits, Endpoint::Chat);
        let ids = self
            .run(template.spec.deadline, template.spec.asker, limits, move |text| {
                let messages = body.messages.unwrap_or_default();
                let mut input = ChatInput::new(&messages);
                input.tools = shown.as_ref();
                input.kwargs = body.chat_template_kwargs.as_ref();
                let rendered = text.render_chat(&input)?;
                bound(&rendered)?;
                Ok(text.encode_chat(&rendered)?)
            })
            .await?;
        let spec = template.spec(ids, limits)?;
        Ok(Prepared {
            specs: vec![spec],
            n,
            stream,
            include_usage,
            parallel_calls,
        })
    }

    /// Prepares `/v1/completions`.
    pub async fn completions(
        &self,
        body: CompletionBody,
        limits: &Limits,
        origin: Origin,
    ) -> Result<Prepared, RouterError> {
        body.check_best_of()?;
        let common = Common {
            logprobs: body.scores()?,
            ..body.common()
        };
        let mut template = Template::check(
            common,
            limits,
            origin,
            Endpoint::Completions,
            self.text.vocabulary().len(),
        )?;
        template.spec.max_new_tokens.get_or_insert(DEFAULT_COMPLETION_TOKENS);
        let prompts = body.prompt.map(|prompts| prompts.0).unwrap_or_default();
        if prompts.is_empty() {
            return Err(RouterError::field("prompt", "give at least one prompt"));
        }
        if prompts.len() > MAX_PROMPTS {
            let detail = format!(
                "{} prompts, but one request may have at most {MAX_PROMPTS}",
                prompts.len()
            );
            return Err(RouterError::field("prompt", detail));
        }
        check_choices(prompts.len(), template.n)?;
        let single = prompts.len() == 1;
        let bound = self.bound(limits, Endpoint::Completions);
        let texts = prompts.iter().any(|prompt| matches!(prompt, Prompt::Text(_)));
        let encode = move |text: &Text| {
            let vocabulary = text.vocabulary().len();
            prompts
                .into_iter()
                .enumerate()
                .map(|(at, prompt)| match prompt {
                    Prompt::Text(prompt) => {
                        bound(&prompt)?;
                        Ok(text.encode_prompt(&prompt)?)
                    }
                    Prompt::Ids(ids) => {
                        let field = if single {
                            "prompt".to_owned()
                        } else {
                            format!("prompt[{at}]")
                        };
                        check_ids(&field, &ids, vocabulary)?;
                        Ok(ids)
                    }
                })
                .collect::<Result<Vec<_>, _>>()
        };
        // ids need no tokenizer, and to look at them takes less than to have read them
        let all = if texts {
            self.run(template.spec.deadline, template.spec.asker, limits, encode)
                .await?
        } else {
            encode(&self.text)?
        };
        let specs = all
            .into_iter()
            .map(|ids| template.clone().spec(ids, limits))
            .collect::<Result<_, _>>()?;
        Ok(Prepared {
            specs,
            n: template.n,
            stream: template.stream,
            include_usage: template.include_usage,
            parallel_calls: true,
        })
    }
}

/// Everything of a spec but the prompt, checked before any work is done for it.
#[derive(Debug, Clone)]
struct Template {
    spec: Spec,
    n: usize,
    stream: bool,
    include_usage: bool,
}

impl Template {
    fn check(
        common: Common<'_>,
        limits: &Limits,
        origin: Origin,
        endpoint: Endpoint,
        vocabulary: usize,
    ) -> Result<Self, RouterError> {
        let asked = common
            .model
            .ok_or_else(|| RouterError::field("model", "missing; GET /v1/models names it"))?;
        limits.check_model(asked)?;
        if common.max_tokens == Some(0) {
            return Err(RouterError::field(common.max_tokens_field, "0 is not at least 1"));
        }
        check_choices(1, common.n as usize)?;
        StopScanner::new(common.stop)?;
        check_stop_tokens(common.stop_token_ids, vocabulary)?;
        Ok(Self {
            spec: Spec {
                request_id: origin.request_id,
                endpoint,
                came: origin.came,
                knobs: limits.knobs,
                deadline: origin.came + limits.knobs.request(),
                prompt: Arc::default(),
                sampling: sampling(&common, vocabulary)?,
                max_new_tokens: common.max_tokens,
                max_length_tokens: limits.max_length_tokens,
                stop_token_ids: common.stop_token_ids.to_vec(),
                ignore_eos: common.ignore_eos,
                stops: common.stop.to_vec(),
                calls: None,
                show_special_tokens: !common.skip_special_tokens,
                streamed: common.stream,
                asker: origin.asker,
            },
            n: common.n as usize,
            stream: common.stream,
            include_usage: common.include_usage,
        })
    }

    fn spec(mut self, prompt: Vec<u32>, limits: &Limits) -> Result<Spec, RouterError> {
        self.spec.prompt = prompt.into();
        if self.spec.prompt.is_empty() {
            return Err(RouterError::field(self.spec.endpoint.prompt_field(), "has no token"));
        }
        if let Some(max_length_tokens) = limits.max_length_tokens {
            let (least, most) = (self.spec.sampling.min_new_tokens, fit(&self.spec, max_length_tokens)?);
            if least > most {
                let detail = format!("{least} tokens do not fit: this answer may have {most}");
                return Err(RouterError::field("min_tokens", detail));
            }
        }
        Ok(self.spec)
    }
}

fn check_choices(prompts: usize, n: usize) -> Result<(), RouterError> {
    let detail = match n {
        0 => "0 is not at least 1".to_owned(),
        n if prompts * n > MAX_CHOICES && prompts == 1 => format!("{n} is not in 1 to {MAX_CHOICES}"),
        n if prompts * n > MAX_CHOICES => {
            format!("{n} answers to each of {prompts} prompts are more than {MAX_CHOICES} in all")
        }
        _ => return Ok(()),
    };
    Err(RouterError::field("n", detail))
}

/// Does the vocabulary have them all?
pub(super) fn check_ids(field: &str, ids: &[u32], vocabulary: usize) -> Result<(), RouterError> {
    match ids.iter().position(|&id| id as usize >= vocabulary) {
        None => Ok(()),
        Some(wrong) => {
            let detail = format!(
                "token id {} is not below {vocabulary}, the vocabulary's size",
                ids[wrong]
            );
            Err(RouterError::field(format!("{field}[{wrong}]"), detail))
        }
    }
}

fn check_stop_tokens(ids: &[u32], vocabulary: usize) -> Result<(), RouterError> {
    if ids.len() > MAX_STOP_TOKENS {
        let detail = format!("{} ids, but at most {MAX_STOP_TOKENS} are allowed", ids.len());
        return Err(RouterError::field("stop_token_ids", detail));
    }
    match ids.iter().find(|&&id| id as usize >= vocabulary) {
        Some(id) => {
            let detail = format!("{id} is not below {vocabulary}, the vocabulary's size");
            Err(RouterError::field("stop_token_ids", detail))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::knobs::{OnPrefillFailure, Policy};

    #[tokio::test]
    async fn waiting_for_the_tokenizer_has_no_end() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.gguf");
        let text = Arc::new(Text::load(&file).unwrap());
        let exposition = tandem_telemetry::Metrics::new("tandem-router", "test");
        let work = TextWork::new(text, Metrics::register(&exposition, &Arc::default()));
        let cores = work.slots.available_permits() as u32;
        let _all = work.slots.acquire_many(cores).await.unwrap();
        let body = CompletionBody::read(br#"{"model":"tiny","prompt":"x"}"#).unwrap();
        let limits = Limits {
            model: "tiny".into(),
            max_length_tokens: None,
            knobs: Knobs {
                policy: Policy::LeastLoaded,
                on_prefill_failure: OnPrefillFailure::Retry,
                queue_ms: 20,
                request_ms: 20,
            },
        };
        let origin = Origin {
            request_id: "r".into(),
            came: Instant::now(),
            asker: Asker::Client,
        };
        let ends = tokio::time::timeout(Duration::from_secs(10), work.completions(body, &limits, origin));
        assert_eq!(ends.await.expect("it hangs").unwrap_err().code(), "deadline");
    }
}
