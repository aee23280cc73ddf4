//! Exact count of live and peak bytes by category.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Purpose of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Parameters as the model reads them.
    Params,
    /// Parameters gathered whole for a while; each rank keeps its shard under `Params`.
    Gathered,
    /// Accumulated gradients that an update reads.
    Grads,
    /// Optimizer state: moments, momentum.
    State,
    /// Full-precision copies of low-precision parameters.
    Master,
    /// Gradients in flight: pooled buckets that are freed or reused once reduced.
    Buckets,
    /// Copies made for transfers: exchange vectors, pinned memory.
    Staging,
    /// Memory that the caller's framework allocates for itself.
    Framework,
}

impl Category {
    /// All categories, in the order of reports.
    pub const ALL: [Category; 8] = [
        Category::Params,
        Category::Gathered,
        Category::Grads,
        Category::State,
        Category::Master,
        Category::Buckets,
        Category::Staging,
        Category::Framework,
    ];
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Category::Params => "params",
            Category::Gathered => "gathered",
            Category::Grads => "grads",
            Category::State => "state",
            Category::Master => "master",
            Category::Buckets => "buckets",
            Category::Staging => "staging",
            Category::Framework => "framework",
        })
    }
}

/// Counts bytes by [`Category`]. Clones share their counts.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    by_category: [Count; Category::ALL.len()],
    total: Count,
}

#[derive(Debug, Default)]
struct Count {
    live: AtomicU64,
    peak: AtomicU64,
}

impl Count {
    // `fetch_add` returned a value that `live` really had, so the peak is exact under any interleaving.
    fn add(&self, bytes: u64) {
        let live = self.live.fetch_add(bytes, Relaxed).saturating_add(bytes);
        self.peak.fetch_max(live, Relaxed);
    }

    fn reset_peak(&self) {
        self.peak.store(self.live.load(Relaxed), Relaxed);
    }
}

impl Meter {
    /// Returns a meter at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts `bytes` for as long as the returned claim lives. Buffers claim their bytes themselves; call this for memory that
    /// other code allocated.
    #[must_use = "the bytes count only while the claim lives"]
    pub fn claim(&self, category: Category, bytes: u64) -> Claim {
        self.counts.by_category[category as usize].add(bytes);
        self.counts.total.add(bytes);
        Claim { counts: Arc::clone(&self.counts), category, bytes }
    }

    /// Bytes of a category live now.
    pub fn live(&self, category: Category) -> u64 {
        self.counts.by_category[category as usize].live.load(Relaxed)
    }

    /// Peak of a category's live bytes since the last [`reset_peaks`](Self::reset_peaks).
    pub fn peak(&self, category: Category) -> u64 {
        self.counts.by_category[category as usize].peak.load(Relaxed)
    }

    /// Bytes of all categories live now.
    pub fn live_total(&self) -> u64 {
        self.counts.total.live.load(Relaxed)
    }

    /// Peak of the live bytes of all categories together; at most the sum of the categories' peaks.
    pub fn peak_total(&self) -> u64 {
        self.counts.total.peak.load(Relaxed)
    }

    /// Resets all peaks to the bytes live now. Call it while no thread allocates.
    pub fn reset_peaks(&self) {
        self.counts.by_category.iter().for_each(Count::reset_peak);
        self.counts.total.reset_peak();
    }
}

/// Bytes counted by a [`Meter`] until this is dropped.
///
/// ```
/// use meshstep_tensor::{Category, Claim, Meter};
///
/// let meter = Meter::new();
/// let claim: Claim = meter.claim(Category::Framework, 1000); // memory of another library
/// assert_eq!((claim.bytes(), meter.live(Category::Framework)), (1000, 1000));
/// drop(claim);
/// assert_eq!((meter.live(Category::Framework), meter.peak(Category::Framework)), (0, 1000));
/// ```
#[derive(Debug)]
pub struct Claim {
    counts: Arc<Counts>,
    category: Category,
    bytes: u64,
}

impl Claim {
    /// Category of the bytes.
    pub fn category(&self) -> Category {
        self.category
    }

    /// Number of bytes counted.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.counts.by_category[self.category as usize].live.fetch_sub(self.bytes, Relaxed);
        self.counts.total.live.fetch_sub(self.bytes, Relaxed);
    }
}
