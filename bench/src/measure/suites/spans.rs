//! Measures the time that this thread spends in the spans of a step.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, anyhow};
use meshstep_comm::{Communicator, loopback};
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

/// Seconds by span, and in total.
#[derive(Clone, Debug, Default)]
pub(super) struct Spans {
    named: [f64; Spans::NAMES.len()],
    all: f64,
}

impl Spans {
    /// Names of the measured spans; they are not nested.
    pub(super) const NAMES: [&str; 5] = ["reduce", "norm", "exchange", "update", "gather"];

    /// Returns the seconds of each span, and of the remaining time.
    pub(super) fn parts(&self) -> Vec<f64> {
        let rest = self.all - self.named.iter().sum::<f64>();
        self.named.iter().copied().chain([rest.max(0.0)]).collect()
    }
}

thread_local! {
    static SEEN: RefCell<Spans> = RefCell::default();
}

/// Data of a span: its index, and its time of entry.
struct Entered(usize, RefCell<Option<Instant>>);

// One thread at a time enters a span, but the registry's extensions require `Sync`.
struct Mark(std::sync::Mutex<Entered>);

struct Watch;

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Watch {
    fn on_new_span(&self, attrs: &Attributes<'_>, id: &Id, all: Context<'_, S>) {
        let index = Spans::NAMES.iter().position(|name| *name == attrs.metadata().name());
        if let (Some(index), Some(span)) = (index, all.span(id)) {
            span.extensions_mut().insert(Mark(std::sync::Mutex::new(Entered(index, RefCell::default()))));
        }
    }

    fn on_enter(&self, id: &Id, all: Context<'_, S>) {
        if let Some(span) = all.span(id)
            && let Some(Mark(mark)) = span.extensions().get()
        {
            let mark = mark.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            mark.1.replace(Some(Instant::now()));
        }
    }

    fn on_exit(&self, id: &Id, all: Context<'_, S>) {
        if let Some(span) = all.span(id)
            && let Some(Mark(mark)) = span.extensions().get()
        {
            let mark = mark.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(since) = mark.1.take() {
                SEEN.with_borrow_mut(|seen| seen.named[mark.0] += since.elapsed().as_secs_f64());
            }
        }
    }
}

/// Runs `work`, and returns the time that this thread spends in spans.
pub(super) fn watch(work: impl FnOnce() -> Result<()>) -> Result<Spans> {
    SEEN.take();
    let subscriber = tracing_subscriber::registry().with(Watch);
    let start = Instant::now();
    tracing::subscriber::with_default(subscriber, work)?;
    Ok(Spans { all: start.elapsed().as_secs_f64(), ..SEEN.take() })
}

/// Returns the spans of rank 0.
pub(super) fn of_rank_zero(
    ranks: usize,
    work: impl Fn(Arc<dyn Communicator>) -> Result<Vec<Spans>> + Sync,
) -> Result<Vec<Spans>> {
    let all = loopback::spawn(ranks, work)?;
    let all = all.into_iter().collect::<Result<Vec<_>>>()?;
    all.into_iter().next().ok_or_else(|| anyhow!("there are no ranks"))
}
