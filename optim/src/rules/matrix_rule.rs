//! Phases of an update that sees whole matrices, for callers that hold a matrix in pieces.

use crate::{Error, Flat, Isa, Rule, Scalars, Segment, cuda};
use meshstep_tensor::{Queue, SliceMut};

/// A rule with [`Sees::Matrix`](crate::Sees::Matrix) in three phases. Two of them work on each element on its own, so that only the step
/// of a matrix is brought together for the phase between them:
///
/// ```text
/// step = advance(grads, state)        on any ranges of a tensor
/// step = transform(step)              on all blocks of a tensor
/// params = apply(params, step)        on any ranges
/// ```
///
/// [`Rule::update`] is these three in a row, with the same bits.
///
/// ```
/// use meshstep_optim::{Flat, Isa, MatrixRule, Muon, Rule, Scalars, Segment};
/// use meshstep_tensor::Queue;
///
/// let (rule, queue, scalars, isa) = (Muon::default(), Queue::cpu(), Scalars::default(), Isa::detect());
/// let phases: &dyn MatrixRule = rule.by_matrix().unwrap();
/// assert!(phases.cost(6, (2, 3)) > 0);
/// // A matrix of 2 rows and 3 columns, on two ranks of 4 and 2 elements.
/// let (mut params, mut grads) = ([1f32; 6], [3f32, -1.0, 2.0, 0.5, 1.0, 0.0]);
/// let (mut momentum, mut step) = ([0f32; 6], [0f32; 6]);
/// let piece = |from: u64, len| [Segment { first: from, matrix: Some((2, 3)), ..Segment::new(0..len, 1) }];
/// for (from, to) in [(0, 4), (4, 6)] {
///     let (step, grads) = ((&mut step[from..to]).into(), (&mut grads[from..to]).into());
///     let state = &mut [(&mut momentum[from..to]).into()];
///     let flat = Flat { params: step, grads, state, copy: None, remainder: None };
///     phases.advance(isa, flat, &piece(from as u64, to - from), &scalars, &queue)?;
/// }
/// phases.transform(isa, (&mut step).into(), (2, 3), &queue)?;
/// for (from, to) in [(0, 4), (4, 6)] {
///     let (params, grads) = ((&mut params[from..to]).into(), (&mut step[from..to]).into());
///     let flat = Flat { params, grads, state: &mut [], copy: None, remainder: None };
///     phases.apply(isa, flat, &piece(from as u64, to - from), &scalars, &queue)?;
/// }
/// assert!(params[0] < 1.0 && params[1] > 0.999);
/// # Ok::<(), meshstep_optim::Error>(())
/// ```
pub trait MatrixRule: Rule {
    /// Returns the relative cost of [`transform`](Self::transform) for a tensor of `len` elements with matrices of these rows and columns,
    /// to balance tensors between ranks.
    fn cost(&self, len: usize, matrix: (usize, usize)) -> u64;

    /// Advances the state and writes the step before its transformation, which replaces `flat.params`: numbers of the type that the rule
    /// computes in. `flat` has no copy and no remainder. Checks come first, as in [`Rule::update`].
    fn advance(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error>;

    /// Transforms the step of a whole tensor in place. `matrix` has the rows and columns of a [`Segment`](Segment::matrix).
    fn transform(
        &self,
        isa: Isa,
        step: SliceMut<'_>,
        matrix: (usize, usize),
        queue: &Queue,
    ) -> Result<(), Error>;

    /// Updates the parameters along the transformed step, which is in the place of the gradients. `flat` has no state; the segments have
    /// the rows and columns of the whole tensor. Checks come first.
    fn apply(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), Error>;

    /// Returns the arguments of the phases on a GPU for a tensor with matrices of these rows and columns: `None` if the rule has no kernels
    /// for them, or does not update such matrices.
    fn orthogonalization(&self, matrix: (usize, usize)) -> Option<cuda::Orthogonalization> {
        let _ = matrix;
        None
    }
}
