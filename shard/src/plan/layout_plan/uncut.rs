//! Parts with chunks that cut no parameter, for rules that see whole matrices. Arithmetic only.

use crate::plan::bucket;
use crate::plan::layout_plan::Part;
use crate::plan::units::Units;
use crate::{Error, Groups, Options, Stage};

/// Padding of uncut parts as a share of the elements of a cut one, above which matrices are cut and exchanged: 1/4.
const MOST_PADDING: usize = 4;

impl Part {
    /// Plans the buckets again so that no rank's chunk ends within a parameter, with the options of the plan: for rules that see whole
    /// matrices, at stages 1 and 2. The largest parameters come first, each to the rank with the fewest elements of its bucket; the
    /// chunks of the other ranks are padded. An optimizer does so itself for a rule with
    /// [`Sees::Matrix`](meshstep_optim::Sees::Matrix).
    ///
    /// ```
    /// use meshstep_optim::Muon;
    /// use meshstep_shard::{Options, Part, Plan, Sizes};
    /// use meshstep_tensor::{DType, Layout};
    ///
    /// // 48 matrices on 4 ranks: 12 each, and no padding.
    /// let layout = (0..48).fold(Layout::builder(), |b, i| b.param(format!("w{i}"), &[64, 96], DType::F32)).build()?;
    /// let options = Options::default();
    /// let part = Part::new(layout, Sizes::all(4), [], &options)?.uncut(&options)?;
    /// assert!(part.buckets()[0].params.iter().all(|w| w.start / (12 * 64 * 96) == w.owner));
    /// let memory = Plan::of(4, vec![part], &options)?.memory(0, &Muon::default());
    /// assert_eq!(memory.state, 12 * 64 * 96 * 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn uncut(self, options: &Options) -> Result<Part, Error> {
        let before = self.elements();
        let uncut = self.without_cuts(options)?;
        bucket::warn_of_padding(before, uncut.elements());
        Ok(uncut)
    }

    fn without_cuts(self, options: &Options) -> Result<Part, Error> {
        if !matches!(self.stage, Stage::Zero1 | Stage::Zero2) {
            return Ok(self);
        }
        let buckets = bucket::cut_between_params(&self.layout, self.sizes.shards, options)?;
        Ok(Part { units: Units::new(&self.layout, &buckets), buckets, uncut: true, ..self })
    }

    /// Returns the elements of all buckets, padding included.
    fn elements(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.len).sum()
    }

    /// Returns true if each parameter is updated by one rank alone, or whole by every rank.
    pub fn is_uncut(&self) -> bool {
        self.uncut || !self.stage.cuts_state()
    }

    /// Plans the part for `rules`: as it is for rules that see elements or tensors, and if a mesh has [cut](Self::with_cuts) it; otherwise
    /// [`uncut`](Self::uncut). Where that adds more
    /// than a quarter of padding, as with few matrices on many ranks, and the rules update pieces of matrices, it stays cut, and its
    /// matrices are [exchanged](Self::matrix_exchange) at stages 1 and 2. An optimizer calls this method for its layouts.
    ///
    /// ```
    /// use meshstep_optim::Muon;
    /// use meshstep_shard::{Options, Part, Sizes};
    /// use meshstep_tensor::{DType, Layout};
    ///
    /// let add = |b: meshstep_tensor::LayoutBuilder, i| b.param(format!("w{i}"), &[64, 96], DType::F32);
    /// let matrices = |n| (0..n).fold(Layout::builder(), add).build();
    /// let options = Options::default();
    /// for (count, uncut) in [(48, true), (4, true), (5, false), (1, false)] {
    ///     let part = Part::new(matrices(count)?, Sizes::all(4), [], &options)?.for_rules(&Muon::default().into(), &options)?;
    ///     assert_eq!(part.is_uncut(), uncut, "{count} matrices");
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn for_rules(self, rules: &Groups, options: &Options) -> Result<Part, Error> {
        if !rules.see_matrices() || self.cuts.is_some() {
            return Ok(self);
        }
        let most = self.elements().saturating_add(self.elements() / MOST_PADDING);
        let exchanged = rules.update_pieces() && self.clone().without_cuts(options)?.elements() > most;
        if exchanged { Ok(self) } else { self.uncut(options) }
    }
}
