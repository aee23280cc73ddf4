//! Memory and launches of updates of matrices on a GPU: those that this rank has alone, and those that visit it.

use crate::error::Error;
use crate::update::matrix_exchange::MatrixUpdates;
use crate::update::owned_bucket::Owned;
use crate::update::params::Params;
use crate::update::segments::SegmentPiece;
use meshstep_optim::Rule;
use meshstep_optim::cuda::{MatrixMemory, MatrixSizes, Orthogonalizer, StepBlock};
use meshstep_tensor::{DType, Queue, SliceMut};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Scratch memory for the longest matrices of each type, allocated once, and the launches that transform visitors.
#[derive(Debug, Default)]
pub(crate) struct GpuMatrices {
    memory: Vec<Arc<MatrixMemory>>,
    /// By parameter.
    visitors: HashMap<usize, (DType, Orthogonalizer)>,
    /// True for each parameter that the exchange updates.
    pieces: Vec<bool>,
}

impl GpuMatrices {
    /// Allocates the memory, in which all updates that exist already work from now on.
    pub(crate) fn new(params: &mut Params, exchanged: &MatrixUpdates) -> Result<Self, Error> {
        let mut made = GpuMatrices { pieces: vec![false; params.entries.len()], ..GpuMatrices::default() };
        exchanged.pieces().for_each(|param| made.pieces[param] = true);
        let mut sizes = BTreeMap::<DType, MatrixSizes>::new();
        made.visit(params, exchanged, &mut sizes)?;
        params.buckets.iter().for_each(|owned| made.count(params, owned, &mut sizes));
        let (queue, meter) = (&params.options.queue, &params.options.meter);
        for (dtype, sizes) in sizes {
            made.memory.push(Arc::new(MatrixMemory::new(dtype, sizes, queue, meter)?));
        }
        for owned in &mut params.buckets {
            let memory = made.memory(computed_in(owned.update_dtype()));
            for update in owned.updates() {
                memory.map_or(Ok(()), |memory| update.use_memory(memory, queue))?;
            }
        }
        Ok(made)
    }

    /// Makes the launches of matrices that visit this rank, and adds their memory to `sizes`.
    fn visit(
        &mut self,
        params: &Params,
        exchanged: &MatrixUpdates,
        sizes: &mut BTreeMap<DType, MatrixSizes>,
    ) -> Result<(), Error> {
        let (queue, meter) = (&params.options.queue, &params.options.meter);
        for visitor in exchanged.visitors() {
            let (rule, of) = (&*params.group_of(visitor.param).rule, (visitor.dtype, visitor.len));
            let matrix = params.entries[visitor.param].matrix.unwrap_or_default();
            let made = Orthogonalizer::new(rule, of, matrix, queue, meter)?;
            let all = sizes.entry(visitor.dtype).or_default();
            *all = all.max(made.sizes());
            self.visitors.insert(visitor.param, (visitor.dtype, made));
        }
        Ok(())
    }

    /// Adds the memory of the matrices that this rank has alone in a bucket.
    fn count(&self, params: &Params, owned: &Owned, sizes: &mut BTreeMap<DType, MatrixSizes>) {
        let size = |rule: &dyn Rule, piece: &SegmentPiece| {
            let matrix = params.entries[piece.param].matrix?;
            Some(rule.by_matrix()?.orthogonalization(matrix)?.sizes(piece.range.len()))
        };
        for (group, piece) in owned.pieces() {
            if let Some(size) = size(&*params.groups[group].rule, piece) {
                let all = sizes.entry(computed_in(owned.update_dtype())).or_default();
                *all = if self.is_piece(piece.param) { *all } else { all.max(size) };
            }
        }
    }

    /// Returns true if the exchange updates this rank's piece of a parameter.
    pub(crate) fn is_piece(&self, param: usize) -> bool {
        self.pieces.get(param).copied().unwrap_or(false)
    }

    /// Returns the scratch memory of rules that compute in this type; `None` if none sees matrices.
    pub(crate) fn memory(&self, dtype: DType) -> Option<&Arc<MatrixMemory>> {
        self.memory.iter().find(|memory| memory.dtype() == dtype)
    }

    /// Transforms a matrix that visits this rank in place.
    pub(crate) fn transform(
        &self,
        param: usize,
        whole: SliceMut<'_>,
        step: &StepBlock,
        queue: &Queue,
    ) -> Result<(), Error> {
        let Some((dtype, visitor)) = self.visitors.get(&param) else { return Ok(()) };
        let Some(memory) = self.memory(*dtype) else { return Ok(()) };
        Ok(visitor.run(whole, memory, step, queue)?)
    }
}

/// Returns the type that rules compute in, for parameters of this type.
pub(crate) fn computed_in(params: DType) -> DType {
    if params == DType::F64 { DType::F64 } else { DType::F32 }
}
