//! The two generating endpoints, whole and streamed.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use http::header::{self, HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use super::account::Account;
use super::body::{Answer, Feed, Unsent, read};
use super::{App, routes};
use crate::api::Head;
use crate::api::answer::{Usage, Whole, whole};
use crate::api::chunks::{self, Chunks};
use crate::api::prepare::Prepared;
use crate::api::request::{ChatBody, CompletionBody};
use crate::error::RouterError;
use crate::evidence::Stage;
use crate::flow::together::seed;
use crate::flow::{Choice, Done, Event, Part, Piece, Progress, Spec};
use crate::metrics::Endpoint;
use crate::text::{ToolFormat, ToolScanner};

/// Chat.
pub const CHAT: &str = "/v1/chat/completions";
/// Completions.
pub const COMPLETIONS: &str = "/v1/completions";

/// What happens to the choices of one request, each with its index.
type Events = Pin<Box<dyn Stream<Item = (usize, Event)> + Send>>;

/// Answers a request of either endpoint. Takes the account if the answer outlives this call.
pub async fn answer(
    app: &Arc<App>,
    endpoint: Endpoint,
    request: Request<Incoming>,
    account: &mut Option<Account>,
) -> Result<Response<Answer>, RouterError> {
    let (parts, body) = request.into_parts();
    let held = read(&parts.headers, body, app.config.max_body_bytes, &app.bodies).await?;
    let Some(open) = account.as_mut() else {
        return Err(RouterError::Internal("a request without an account".into()));
    };
    open.text();
    let origin = open.origin();
    let limits = app.limits();
    let Prepared {
        specs,
        n,
        stream: streamed,
        include_usage,
        parallel_calls,
    } = match endpoint {
        Endpoint::Chat => app.text.chat(ChatBody::read(&held.bytes)?, &limits, origin).await?,
        Endpoint::Completions | Endpoint::Other => {
            app.text
                .completions(CompletionBody::read(&held.bytes)?, &limits, origin)
                .await?
        }
    };
    drop(held);
    let head = Head::new(endpoint, &limits.model);
    let scored = specs.first().is_some_and(|spec| spec.sampling.logprobs.is_some());
    let scores = scored.then(|| Arc::clone(app.flow.text.vocabulary()));
    let most_calls = if parallel_calls { usize::MAX } else { 1 };
    let run = Run::new(app, specs, n, most_calls, &open.progress)?;
    open.answers();
    if streamed {
        open.streamed();
        stream(
            app,
            Chunks::new(&head, include_usage, scores),
            include_usage,
            run,
            account,
        )
        .await
    } else {
        let choices = run.finish().await?;
        Ok(routes::json(StatusCode::OK, whole(&head, &choices, scores.as_deref())))
    }
}

/// The running choices of one request, under its deadline.
struct Run {
    events: Events,
    choices: usize,
    /// How tool calls are written in the answers.
    calls: Option<ToolFormat>,
    /// So many calls of an answer are told, others are left out.
    most_calls: usize,
    // both are made once: made anew for each event, they would be put into their lists and taken out for each token
    deadline: Pin<Box<Sleep>>,
    /// When its time is over, the time aside in which it is held back.
    ends: Instant,
    /// How long that is.
    time: Duration,
    progress: Arc<Progress>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    app: Arc<App>,
}

impl Run {
    /// `n` choices for each spec; those of the first come first.
    fn new(
        app: &Arc<App>,
        specs: Vec<Spec>,
        n: usize,
        most_calls: usize,
        progress: &Arc<Progress>,
    ) -> Result<Self, RouterError> {
        let choices = specs.len() * n;
        let calls = specs.first().and_then(|spec| spec.calls);
        let deadline = specs.first().map_or_else(Instant::now, |spec| spec.deadline.into());
        let time = specs.first().map_or(Duration::ZERO, |spec| spec.knobs.request());
        let mut all = Vec::with_capacity(choices);
        for spec in specs {
            for (at, part) in Part::of(n).into_iter().enumerate() {
                let mut spec = spec.clone();
                spec.sampling.seed = seed(spec.sampling.seed, at);
                let choice = Choice::new(Arc::clone(&app.flow), spec, part, Arc::clone(progress))?;
                let index = all.len();
                all.push(choice.events().map(move |event| (index, event)).boxed());
            }
        }
        let events: Events = if choices == 1 {
            all.remove(0)
        } else {
            futures::stream::select_all(all).boxed()
        };
        Ok(Self {
            events,
            choices,
            calls,
            most_calls,
            deadline: Box::pin(tokio::time::sleep_until(deadline)),
            ends: deadline,
            time,
            progress: Arc::clone(progress),
            cut: Box::pin(app.cut.clone().cancelled_owned()),
            app: Arc::clone(app),
        })
    }

    /// The next event; a failure of any choice is one of the request.
    async fn next(&mut self) -> Result<(usize, Event), RouterError> {
        loop {
            return tokio::select! {
                biased;
                event = self.events.next() => match event {
                    Some((_, Event::Failed(error))) => Err(error),
                    Some(event) => Ok(event),
                    None => Err(RouterError::Internal("a choice ended without its last event".into())),
                },
                () = &mut self.deadline => {
                    let ends = self.ends + self.progress.ledger().spent(std::time::Instant::now())[Stage::Held];
                    if ends > Instant::now() {
                        self.deadline.as_mut().reset(ends);
                        continue;
                    }
                    Err(RouterError::Deadline(self.time))
                }
                () = &mut self.cut => Err(RouterError::Draining),
            };
        }
    }

    async fn finish(mut self) -> Result<Vec<Whole>, RouterError> {
        let mut pieces = vec![Piece::default(); self.choices];
        let mut ends: Vec<Option<Done>> = vec![None; self.choices];
        let mut open = self.choices;
        while open > 0 {
            let (index, event) = self.next().await?;
            match event {
                Event::Accepted | Event::Failed(_) => {}
                Event::Text(piece) => pieces[index].append(piece),
                Event::Restarted => pieces[index] = Piece::default(),
                Event::Done(mut done) => {
                    pieces[index].append(std::mem::take(&mut done.piece));
                    ends[index] = Some(done);
                    open -= 1;
                }
            }
        }
        Ok(pieces
            .into_iter()
            .zip(ends)
            .filter_map(|(piece, done)| Some(Whole::new(piece, done?, self.calls, self.most_calls)))
            .collect())
    }
}

/// Sends the head as soon as an engine has the request or a comment is due, whichever comes first: what fails quickly fails with
/// a status.
async fn stream(
    app: &Arc<App>,
    chunks: Chunks,
    include_usage: bool,
    mut run: Run,
    account: &mut Option<Account>,
) -> Result<Response<Answer>, RouterError> {
    let first = match tokio::time::timeout(app.config.sse_comment(), run.next()).await {
        Ok(event) => Some(event?),
        Err(_) => None,
    };
    let Some(account) = account.take() else {
        return Err(RouterError::Internal("a stream without an account".into()));
    };
    let writer = Writer {
        chunks,
        include_usage,
        ends: Vec::new(),
        scanners: run
            .calls
            .map_or_else(Vec::new, |format| (0..run.choices).map(|_| format.scanner()).collect()),
        most_calls: run.most_calls,
        account,
    };
    let progress = Arc::clone(&writer.account.progress);
    let body = Answer::streamed(app.config.client_stall(), progress, |feed| {
        writer.write(feed, first, run)
    });
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx holds answers back otherwise
    headers.insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    Ok(response)
}

/// Writes the events of a stream.
struct Writer {
    chunks: Chunks,
    include_usage: bool,
    ends: Vec<Done>,
    /// One for each choice where there may be tool calls.
    scanners: Vec<ToolScanner>,
    most_calls: usize,
    account: Account,
}

impl Writer {
    async fn write(mut self, feed: Feed, first: Option<(usize, Event)>, mut run: Run) {
        let metrics = Arc::clone(&run.app.flow.metrics);
        match self.events(&feed, first, &mut run).await {
            Ok(Ok(())) => {
                self.account.succeeded();
                feed.complete();
            }
            Ok(Err(error)) => {
                // the calls to the engines end before the client hears of it
                drop(run);
                let last = chunks::error(&error, &self.account.request_id);
                self.account.failed(&error);
                if feed.send(last).await.is_ok() {
                    feed.complete();
                }
            }
            Err(Unsent::Stalled) => {
                metrics.client_stalled.inc();
                self.account.stalled();
            }
            // its account is dropped, which says so
            Err(Unsent::Gone) => {}
        }
    }

    async fn events(
        &mut self,
        feed: &Feed,
        first: Option<(usize, Event)>,
        run: &mut Run,
    ) -> Result<Result<(), RouterError>, Unsent> {
        for index in 0..run.choices {
            if let Some(role) = self.chunks.role(index) {
                feed.send(role).await?;
            }
        }
        match first {
            Some((index, event)) => self.event(feed, index, event).await?,
            None => feed.send(chunks::COMMENT).await?,
        }
        let pause = run.app.config.sse_comment();
        let mut comment = std::pin::pin!(tokio::time::sleep(pause));
        while self.ends.len() < run.choices {
            // put off, which is cheaper than another one for each token
            comment.as_mut().reset(Instant::now() + pause);
            tokio::select! {
                biased;
                event = run.next() => match event {
                    Ok((index, event)) => self.event(feed, index, event).await?,
                    Err(error) => return Ok(Err(error)),
                },
                () = &mut comment => feed.send(chunks::COMMENT).await?,
            }
        }
        if self.include_usage {
            feed.send(self.chunks.usage(&Usage::of(&self.ends))).await?;
        }
        feed.send(chunks::DONE).await?;
        Ok(Ok(()))
    }

    async fn event(&mut self, feed: &Feed, index: usize, event: Event) -> Result<(), Unsent> {
        match event {
            Event::Text(piece) => self.piece(feed, index, &piece, false).await,
            Event::Done(mut done) => {
                self.piece(feed, index, &done.piece, true).await?;
                if self.scanners.get(index).is_some_and(ToolScanner::has_calls) {
                    done.finish = done.finish.with_calls();
                }
                feed.send(self.chunks.finish(index, done.finish)).await?;
                self.ends.push(done);
                Ok(())
            }
            // a stream is restarted only before its first text, so there is nothing to take back
            Event::Accepted | Event::Restarted | Event::Failed(_) => Ok(()),
        }
    }

    /// Sends a piece, with its calls told apart; `last`: nothing follows it.
    async fn piece(&mut self, feed: &Feed, index: usize, piece: &Piece, last: bool) -> Result<(), Unsent> {
        let Some(scanner) = self.scanners.get_mut(index) else {
            if piece.is_empty() {
                return Ok(());
            }
            return feed.send(self.chunks.text(index, piece)).await;
        };
        if !piece.tokens.is_empty() {
            // of text that may be held back, or become a call
            let tokens = Piece {
                text: String::new(),
                tokens: piece.tokens.clone(),
            };
            feed.send(self.chunks.text(index, &tokens)).await?;
        }
        let mut events = scanner.push(&piece.text);
        if last {
            events.extend(scanner.finish());
        }
        for event in events
            .iter()
            .filter(|event| event.call().is_none_or(|call| call < self.most_calls))
        {
            feed.send(self.chunks.event(index, event)).await?;
        }
        Ok(())
    }
}
