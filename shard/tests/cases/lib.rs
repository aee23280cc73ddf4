//! One training run as data, run on loopback ranks by Meshstep, or by a simple reference loop.
#![allow(clippy::unwrap_used, missing_docs, reason = "helpers of tests, which fail by panicking")]

pub mod elsewhere;
#[cfg(feature = "cuda")]
pub mod gpu_pair;
#[cfg(feature = "cuda")]
pub mod gpus;
mod hand_over;
mod naive;
pub mod processes;
mod rules;
mod values;

pub use hand_over::pass;
pub use meshstep_cases::{cases, hash, long, tried};
pub use meshstep_optim::{
    Adagrad, Adam, AdamW, Adopt, Flat, Isa, Lamb, Lars, Lion, Momentum, QhAdamW, QhAdopt, RmsProp, Rounding,
    Rule, Scalars, Segment, Sgd, TensorSums,
};
use meshstep_shard::{
    Error, Gathered, Groups, Master, MicroBatch, Moments, Optimizer, Options, Outcome, Owners, Precision,
    Stage, StepArgs,
};
use meshstep_tensor::{DType, Layout, Slice, SliceMut};
use rules::two_moments;
pub use rules::{adamw, schedule_free};
pub use values::{fetch, floats, param, params, put, state, with_dtype};

pub const STAGES: [Stage; 6] = [
    Stage::Replicated,
    Stage::Zero1,
    Stage::Zero2,
    Stage::Zero3,
    Stage::WholeParams(Owners::RoundRobin),
    Stage::WholeParams(Owners::SortedGreedy),
];

const FULL: Precision =
    Precision { master: Master::None, moments: Moments::Full, rounding: Rounding::Nearest, seed: 3 };

pub const F32_MASTER: Precision = Precision { master: Master::F32, ..FULL };

const REMAINDER: Precision = Precision { master: Master::Remainder, ..FULL };

const STOCHASTIC: Precision = Precision { rounding: Rounding::Stochastic, ..FULL };

const MOMENTS: Precision = Precision { moments: Moments::BF16, ..STOCHASTIC };

/// Parameter types and the precisions that fit them.
pub const PRECISIONS: [(DType, Precision); 10] = [
    (DType::F32, FULL),
    (DType::F64, FULL),
    (DType::BF16, F32_MASTER),
    (DType::F16, F32_MASTER),
    (DType::BF16, REMAINDER),
    (DType::BF16, STOCHASTIC),
    (DType::F32, MOMENTS),
    (DType::BF16, MOMENTS),
    (DType::BF16, Precision { master: Master::F32, ..MOMENTS }),
    (DType::BF16, Precision { master: Master::Remainder, ..MOMENTS }),
];

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct Run {
    pub lens: Vec<usize>,
    pub ranks: usize,
    pub steps: u64,
    pub micro_batches: usize,
    pub rule: WhichRule,
    pub max_norm: Option<f64>,
    pub gradients: Gradients,
    pub dtype: DType,
    pub grads: DType,
    pub options: Options,
    /// Each rank hands its gradients over in a random order of its own.
    pub shuffle: bool,
    pub in_place: bool,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WhichRule {
    Sgd,
    SgdMomentum,
    SgdAverage,
    SgdLrInside,
    AdamW,
    Adam,
    AmsGrad,
    RmsProp,
    Adagrad,
    Lion,
    Adopt,
    QhAdopt,
    QhAdamW,
    TwoMoments,
    ScheduleFree,
    Lamb,
    Lars,
}

/// Rules with state that run at every cut.
pub const WITH_STATE: [WhichRule; 16] = [
    WhichRule::AdamW,
    WhichRule::SgdMomentum,
    WhichRule::SgdAverage,
    WhichRule::SgdLrInside,
    WhichRule::Adam,
    WhichRule::AmsGrad,
    WhichRule::RmsProp,
    WhichRule::Adagrad,
    WhichRule::Lion,
    WhichRule::Adopt,
    WhichRule::QhAdopt,
    WhichRule::QhAdamW,
    WhichRule::TwoMoments,
    WhichRule::ScheduleFree,
    WhichRule::Lamb,
    WhichRule::Lars,
];

/// Evaluates `then` with the rule, in its own type.
macro_rules! with_rule {
    ($which:expr, |$rule:ident| $then:expr) => {{
        let momentum = Sgd { momentum: 0.9, weight_decay: 0.01, ..Sgd::default() };
        macro_rules! of {
            ($value:expr) => {{
                let $rule = $value;
                $then
            }};
        }
        match $which {
            WhichRule::Sgd => of!(Sgd::default()),
            WhichRule::SgdMomentum => of!(momentum),
            WhichRule::SgdAverage => of!(Sgd { form: Momentum::Average { debias: true }, ..momentum }),
            WhichRule::SgdLrInside => of!(Sgd { form: Momentum::LrInside, ..momentum }),
            WhichRule::AdamW => of!(adamw()),
            WhichRule::Adam => of!(Adam { weight_decay: 0.1, ..Adam::default() }),
            WhichRule::AmsGrad => of!(AdamW { amsgrad: true, ..adamw() }),
            WhichRule::RmsProp => of!(RmsProp { centered: true, momentum: 0.9, ..RmsProp::default() }),
            WhichRule::Adagrad => of!(Adagrad { lr_decay: 0.01, ..Adagrad::default() }),
            WhichRule::Lion => of!(Lion { weight_decay: 0.1, ..Lion::default() }),
            WhichRule::Adopt => of!(Adopt::default()),
            WhichRule::QhAdopt => of!(QhAdopt::default()),
            WhichRule::QhAdamW => of!(QhAdamW::default()),
            WhichRule::TwoMoments => of!(two_moments()),
            WhichRule::ScheduleFree => of!(schedule_free()),
            WhichRule::Lamb => of!(Lamb::default()),
            WhichRule::Lars => of!(Lars { trust_coefficient: 0.1, ..Lars::default() }),
        }
    }};
}

/// Kinds of gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gradients {
    /// Multiples of 1/64 below 4, times 840: sums, squares, and means over up to 8 ranks are exact.
    Grid,
    /// Any size, different on each rank.
    Rough,
    /// Any size, equal on the ranks.
    Equal,
    /// As `Grid`, except that in the second step rank 0 has an infinity and rank 1 a NaN.
    Broken,
}

/// Result of a run, in bits.
#[derive(Clone, Debug, PartialEq)]
pub struct End {
    pub params: Vec<Vec<u8>>,
    pub norms: Vec<u64>,
    pub coefs: Vec<u64>,
}

impl Default for Run {
    fn default() -> Self {
        Run {
            lens: vec![70, 1, 0, 130, 64, 3],
            ranks: 4,
            steps: 3,
            micro_batches: 1,
            rule: WhichRule::AdamW,
            max_norm: Some(1.0),
            gradients: Gradients::Rough,
            dtype: DType::F32,
            grads: DType::F32,
            options: Options { bucket_len: Some(150), ..Options::default() },
            shuffle: false,
            in_place: false,
            seed: 1,
        }
    }
}

impl Run {
    pub fn stage(&self, stage: Stage) -> Run {
        let meter = meshstep_tensor::Meter::new();
        Run { options: Options { stage, meter, ..self.options.clone() }, ..self.clone() }
    }

    pub fn layout(&self) -> Layout {
        let add = |b: meshstep_tensor::LayoutBuilder, (i, &len): (usize, &usize)| {
            // The first parameter is in no unit.
            let b = if i % 2 == 1 { b.unit(format!("u{}", i / 2)) } else { b };
            b.param(name(i), &[len], self.dtype)
        };
        self.lens.iter().enumerate().fold(Layout::builder(), add).build().unwrap()
    }

    pub fn groups(&self) -> Groups {
        with_rule!(self.rule, |rule| Groups::new(rule))
    }

    /// Returns parameter `i`'s gradient, rounded to the type in which it is handed over.
    pub fn gradient(&self, t: u64, batch: usize, rank: usize, i: usize) -> Vec<f64> {
        let rank = if self.gradients == Gradients::Equal { 0 } else { rank as u64 };
        let key = |j: usize| hash(&[self.seed, t, batch as u64, rank, i as u64, j as u64]);
        let broken = self.gradients == Gradients::Broken && t == 2;
        let value = |j: usize| match self.gradients {
            Gradients::Broken if broken && (rank, i, j) == (0, 3, 7) => f64::INFINITY,
            Gradients::Broken if broken && (rank, i, j) == (1, 0, 5) => f64::NAN,
            Gradients::Grid | Gradients::Broken => ((key(j) % 512) as f64 - 256.0) / 64.0 * 840.0,
            _ => {
                let size = 2f64.powi((key(j) >> 40) as i32 % 16 - 8);
                (((key(j) & 0xffff) as f64 - 32768.0) / 32768.0 * size) as f32 as f64
            }
        };
        drawn(self.lens[i], value)
    }

    pub fn initial(&self, i: usize) -> Vec<f64> {
        let value = |j: usize| (hash(&[self.seed, 77, i as u64, j as u64]) % 4001) as f64 / 2000.0 - 1.0;
        drawn(self.lens[i], value)
    }

    pub fn at(&self, t: u64) -> StepArgs {
        StepArgs { lr: 0.01 / t as f64, max_norm: self.max_norm, ..StepArgs::default() }
    }

    /// Runs on Meshstep; all ranks must end alike.
    pub fn run(&self) -> End {
        let ends = meshstep_comm::loopback::spawn(self.ranks, |comm| self.on_rank(comm).unwrap()).unwrap();
        assert!(ends.iter().all(|end| *end == ends[0]), "ranks end apart: {self:?}");
        ends.into_iter().next().unwrap()
    }

    pub fn build(&self, comm: std::sync::Arc<dyn meshstep_comm::Communicator>) -> Result<Optimizer, Error> {
        let options = Options { grads: Some(self.grads), ..self.options.clone() };
        let options = Options { meter: meshstep_tensor::Meter::new(), ..options };
        let first = |p: &meshstep_tensor::Param, mut out: SliceMut<'_>| {
            out.cast_from(Slice::from(&self.initial(index(p.name()))[..]))
        };
        Optimizer::new(comm, self.layout(), self.groups(), first, options)
    }

    pub fn on_rank(&self, comm: std::sync::Arc<dyn meshstep_comm::Communicator>) -> Result<End, Error> {
        let mut opt = self.build(comm)?;
        let mut end = End { params: Vec::new(), norms: Vec::new(), coefs: Vec::new() };
        for t in 1..=self.steps {
            for batch in 0..self.batches(opt.comm().rank()) {
                self.read_and_hand_over(&mut opt, t, batch)?;
            }
            match opt.step(self.at(t))?.outcome()? {
                Outcome::Applied { norm, coef, .. } => {
                    end.norms.push(norm.to_bits());
                    end.coefs.push(coef.to_bits());
                }
                skipped => panic!("{skipped:?}"),
            }
        }
        end.params = params(&opt);
        Ok(end)
    }

    pub fn boxed_rule(&self) -> Box<dyn Rule> {
        with_rule!(self.rule, |rule| Box::new(rule))
    }
}

/// Returns `value` of each of `len` elements. Short runs repeat values after `PERIOD`, because test code is slow.
fn drawn(len: usize, value: impl Fn(usize) -> f64) -> Vec<f64> {
    // A prime, so that cuts of a vector lie at different phases.
    const PERIOD: usize = 9973;
    if len < 2 * PERIOD || long() {
        return (0..len).map(value).collect();
    }
    let first: Vec<f64> = (0..PERIOD).map(value).collect();
    let mut all = first.repeat(len.div_ceil(PERIOD));
    all.truncate(len);
    all
}

pub fn name(i: usize) -> String {
    format!("p{i}")
}

fn index(name: &str) -> usize {
    name[1..].parse().unwrap()
}

/// Returns a function that decides for each table entry of nested loops, in turn, whether it is tried: see [`tried`].
pub fn draws(one_in: usize) -> impl FnMut() -> bool {
    let mut entries = 0..;
    move || entries.next().is_some_and(|entry| tried(entry, one_in))
}

/// Returns `normal` entries of `all`, cyclically from `first`; all of them in a long run. Consecutive values of `first` cover
/// all.
pub fn turns<T: Copy>(all: &[T], first: usize, normal: u32) -> impl Iterator<Item = T> {
    let count = cases(normal, all.len() as u32) as usize;
    all.iter().copied().cycle().skip(first % all.len()).take(count)
}

/// Runs one test of this program in a process of its own, started by `job`, and returns its output.
pub fn alone(test: &str, job: &mut std::process::Command) -> String {
    let ran = job.args(["--exact", test, "--nocapture", "--test-threads=1"]).output().unwrap();
    let told = String::from_utf8_lossy(&[&ran.stdout[..], &ran.stderr].concat()).into_owned();
    assert!(ran.status.success(), "{told}");
    told
}
