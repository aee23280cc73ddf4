//! One run of L-BFGS, on loopback or other ranks, and its result.

use crate::common::{name, put, with_dtype};
use crate::lbfgs::problems::Problem;
use meshstep_comm::Communicator;
use meshstep_optim::{Lbfgs, LineSearch};
use meshstep_shard::{Combine, Error, LbfgsStep, MicroBatch, Options, ShardedLbfgs};
use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, Param, Slice, SliceMut, cast};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) problem: Problem,
    pub(crate) lens: Vec<usize>,
    pub(crate) rule: Lbfgs,
    pub(crate) dtype: DType,
    pub(crate) options: Options,
    pub(crate) share: Share,
}

/// Division of the computation among ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Share {
    /// Rank 0 computes the whole loss, the others add zeros.
    One,
    /// All ranks compute the whole loss; the mean.
    All,
    /// Each rank computes its own terms; the sum.
    Rows,
}

/// Result of a run, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct End {
    /// Points seen by the closure.
    pub(crate) seen: Vec<Vec<f64>>,
    /// Losses of the iterates.
    pub(crate) losses: Vec<f64>,
    pub(crate) params: Vec<f64>,
    pub(crate) step: LbfgsStep,
}

impl Run {
    pub(crate) fn new(problem: Problem, lens: &[usize], line_search: LineSearch) -> Run {
        let lr = if problem == Problem::Rosenbrock && line_search == LineSearch::None { 0.1 } else { 1.0 };
        let rule = Lbfgs { lr, line_search, max_iter: 300, max_eval: Some(1000), ..Lbfgs::default() };
        let rule = Lbfgs { tolerance_change: 1e-14, history_len: 10, ..rule };
        let options = Options { bucket_len: Some(100), ..Options::default() };
        Run { problem, lens: lens.to_vec(), rule, dtype: DType::F64, options, share: Share::Rows }
    }

    pub(crate) fn len(&self) -> usize {
        self.lens.iter().sum()
    }

    pub(crate) fn build(&self, comm: Arc<dyn Communicator>) -> Result<ShardedLbfgs, Error> {
        let add = |b: meshstep_tensor::LayoutBuilder, (i, &len): (usize, &usize)| {
            b.param(name(i), &[len], self.dtype)
        };
        let layout = self.lens.iter().enumerate().fold(Layout::builder().unit("all"), add).build().unwrap();
        let start = self.problem.start(self.len());
        let first = |p: &Param, out: SliceMut<'_>| {
            let i: usize = p.name()[1..].parse().unwrap();
            let begin: usize = self.lens[..i].iter().sum();
            cast(Slice::from(&start[begin..begin + p.len()]), out)
        };
        let combine = if self.share == Share::All { Combine::Mean } else { Combine::Sum };
        let options = Options { combine, meter: Meter::new(), ..self.options.clone() };
        ShardedLbfgs::new(comm, layout, self.rule.clone(), first, options)
    }

    /// Reads all parameters end to end, as a closure sees them.
    pub(crate) fn read(&self, mb: &MicroBatch<'_>) -> Result<Vec<f64>, Error> {
        let all = mb.gather("all")?;
        Ok((0..self.lens.len()).flat_map(|i| self.wide(all.param(&name(i)).unwrap())).collect())
    }

    /// Copies values from the queue's place.
    fn wide(&self, values: Slice<'_>) -> Vec<f64> {
        let mut here =
            Buffer::zeroed(values.len(), values.dtype(), &Meter::new(), Category::Staging).unwrap();
        self.options.queue.download(values, here.as_mut()).unwrap();
        let mut wide = vec![0.0; values.len()];
        cast(here.as_slice(), SliceMut::from(&mut wide[..])).unwrap();
        wide
    }

    /// Hands over parameter `i`'s gradient in memory of the queue's place.
    pub(crate) fn grad(&self, mb: &MicroBatch<'_>, i: usize, grad: &[f64]) -> Result<(), Error> {
        with_dtype(self.dtype, grad, |grad| mb.grad(&name(i), put(grad, &self.options.queue).as_slice()))
    }

    /// Computes the loss and gradients of `rank`'s share, at `x`.
    pub(crate) fn backward(
        &self,
        mb: &MicroBatch<'_>,
        x: &[f64],
        rank: usize,
        ranks: usize,
    ) -> Result<f64, Error> {
        let (rank, ranks) = match self.share {
            Share::Rows => (rank, ranks),
            Share::One | Share::All => (0, 1),
        };
        let mut g = vec![0.0; x.len()];
        let mut loss = self.problem.part(x, &mut g, rank, ranks);
        let mut begin = 0;
        for (i, len) in self.lens.iter().enumerate() {
            self.grad(mb, i, &g[begin..begin + len])?;
            begin += len;
        }
        if !loss.is_finite() {
            loss = f64::NAN;
        }
        Ok(loss)
    }

    pub(crate) fn on_rank(&self, comm: Arc<dyn Communicator>) -> Result<End, Error> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let mut opt = self.build(comm)?;
        let (mut seen, mut losses) = (Vec::new(), Vec::new());
        let step = opt.step_watched(
            |mb| {
                let x = self.read(mb)?;
                seen.push(x.clone());
                if self.share == Share::One && rank > 0 {
                    for (i, &len) in self.lens.iter().enumerate() {
                        self.grad(mb, i, &vec![0.0; len])?;
                    }
                    return Ok::<_, Error>(0.0);
                }
                self.backward(mb, &x, rank, ranks)
            },
            |at| losses.push(at.loss),
        )?;
        let mut params = Vec::new();
        let all = opt.optimizer().gather("all")?;
        for i in 0..self.lens.len() {
            params.extend(self.wide(all.param(&name(i))?));
        }
        drop(all);
        Ok(End { seen, losses, params, step })
    }

    /// Runs on all ranks, which must end alike.
    pub(crate) fn run(&self, ranks: usize) -> End {
        let ends = meshstep_comm::loopback::spawn(ranks, |comm| self.on_rank(comm).unwrap()).unwrap();
        assert!(ends.iter().all(|end| *end == ends[0]), "ranks end apart: {self:?}");
        ends.into_iter().next().unwrap()
    }
}
