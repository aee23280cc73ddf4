//! Progress of one step's gradients on this rank: its micro-batches, their weights, and the gradients that have come.

use crate::config::options::{Combine, Missing};
use crate::reduce::local_clip::LocalClip;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use twox_hash::XxHash3_64;

/// Parameter index that stands for none.
const NONE: usize = usize::MAX;

/// Progress of the current step's gradients.
#[derive(Debug)]
pub(crate) struct GradProgress {
    /// Micro-batches begun in this step.
    pub(crate) batches: u64,
    /// Sum of their weights.
    pub(crate) weight: u64,
    /// Digest of their weights, in order.
    pub(crate) weights: u64,
    /// True while a micro-batch is begun and not finished.
    unfinished: AtomicBool,
    /// True if a micro-batch was dropped and completed with zeros.
    pub(crate) dropped: bool,
    /// Norm of this rank's own gradients in the last step, and the factor that clipped them.
    pub(crate) local_clip: Option<LocalClip>,
    /// True once the step's last micro-batch is finished.
    due: AtomicBool,
    /// First parameter with a missing gradient.
    missing: AtomicUsize,
    /// True for each parameter that has a gradient; read if ranks count gradients.
    present: Vec<AtomicBool>,
    /// Gradient bytes copied into buckets.
    copied: AtomicU64,
    /// True while parameters hold the values to evaluate: no step may begin.
    pub(crate) evaluating: bool,
    /// Bytes the communicators had sent when the last step ended.
    pub(crate) sent_before: u64,
}

impl GradProgress {
    /// Makes the progress of a step without gradients.
    pub(crate) fn new() -> Self {
        GradProgress {
            batches: 0,
            weight: 0,
            weights: 0,
            unfinished: AtomicBool::new(false),
            dropped: false,
            local_clip: None,
            due: AtomicBool::new(false),
            missing: AtomicUsize::new(NONE),
            present: Vec::new(),
            copied: AtomicU64::new(0),
            evaluating: false,
            sent_before: 0,
        }
    }

    /// Makes room for `params` parameters. Only between steps.
    pub(crate) fn resize(&mut self, params: usize) {
        self.present.resize_with(params, AtomicBool::default);
    }

    /// Counts a micro-batch that begins.
    pub(crate) fn begin(&mut self, weight: u64) {
        self.weight = self.weight.saturating_add(weight);
        self.weights = weighed(self.weights, weight);
        self.batches += 1;
        *self.unfinished.get_mut() = true;
    }

    /// Records the end of a micro-batch; `last`: it was the step's last.
    pub(crate) fn end(&self, last: bool) {
        self.due.store(last, SeqCst);
        self.unfinished.store(false, SeqCst);
    }

    /// Returns true, once, if a micro-batch was dropped unfinished.
    pub(crate) fn take_dropped(&mut self) -> bool {
        let dropped = std::mem::take(self.unfinished.get_mut());
        self.dropped |= dropped;
        dropped
    }

    /// Returns true once the step's last micro-batch is finished.
    pub(crate) fn is_due(&self) -> bool {
        self.due.load(SeqCst)
    }

    /// Records that the dropped micro-batch was the step's last.
    pub(crate) fn set_due(&mut self) {
        *self.due.get_mut() = true;
    }

    /// Records that parameter `param` has a gradient.
    pub(crate) fn set_present(&self, param: usize) {
        self.present[param].store(true, Relaxed);
    }

    /// Returns for each parameter whether it has a gradient.
    pub(crate) fn present(&self) -> impl Iterator<Item = bool> + '_ {
        self.present.iter().map(|present| present.load(SeqCst))
    }

    /// Records that the gradient of `param` is missing, if `policy` makes that an error.
    pub(crate) fn miss(&self, param: usize, policy: Missing) {
        if policy == Missing::Error {
            self.missing.fetch_min(param, SeqCst);
        }
    }

    /// Returns the first parameter with a gradient that is missing and must not be.
    pub(crate) fn missing(&self) -> Option<usize> {
        Some(self.missing.load(SeqCst)).filter(|&param| param != NONE)
    }

    /// Counts gradient bytes copied into buckets.
    pub(crate) fn add_copied(&self, bytes: usize) {
        self.copied.fetch_add(bytes as u64, Relaxed);
    }

    /// Returns the gradient bytes copied into buckets.
    pub(crate) fn copied(&self) -> u64 {
        self.copied.load(Relaxed)
    }

    /// Returns the factor that turns the sum of this rank's micro-batches into one gradient.
    pub(crate) fn own_share(&self, combine: Combine) -> f64 {
        match combine {
            Combine::Mean => 1.0 / self.batches.max(1) as f64,
            Combine::Sum => 1.0,
            Combine::Weighted => 1.0 / self.weight.max(1) as f64,
        }
    }

    /// Forgets the step, whatever its outcome; `sent` is the number of bytes sent so far.
    pub(crate) fn forget(&mut self, sent: u64) {
        self.present.iter_mut().for_each(|present| *present.get_mut() = false);
        (self.batches, self.weight, self.weights) = (0, 0, 0);
        self.dropped = false;
        *self.unfinished.get_mut() = false;
        *self.due.get_mut() = false;
        *self.missing.get_mut() = NONE;
        *self.copied.get_mut() = 0;
        self.sent_before = sent;
    }
}

/// Extends a digest of weights by one more.
pub(crate) fn weighed(so_far: u64, weight: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(so_far, &weight.to_le_bytes())
}
