//! `plan`: what each rank holds and sends at each ZeRO stage. Arithmetic only.

mod model;
mod table;

use std::io::Write;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use meshstep_optim::{Adagrad, AdamW, Adopt, Lamb, Lion, Muon, Sgd};
use meshstep_parallel3d::{Axis, Mesh, Plan as MeshPlan};
use meshstep_shard::{Error, Groups, Master, Options, Precision, Stage, hidden_matrices};
use meshstep_tensor::DType;

use crate::number::within;
use model::Source;
use table::Types;

/// Options of `plan`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Plan {
    /// gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama3-8b, llama3-70b, llama3-405b; a safetensors file, of which only the header is
    /// read; or a number of parameters such as 7e9, planned as 32 units of one vector each
    #[arg(value_name = "MODEL|FILE|NUMBER", value_parser = Source::parse)]
    source: Source,
    /// Number of data-parallel ranks
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = within::<1, MOST_RANKS>)]
    ranks: usize,
    /// Ranks as a mesh, for example dp=16,tp=8; tp only for the models named above, pp for the llama3 ones
    #[arg(long, value_name = "AXIS=N,...", conflicts_with = "ranks")]
    mesh: Option<Mesh>,
    /// Type of the parameters; tensors of a file that are no floats are left out [default: that of the file; bf16 otherwise]
    #[arg(long, value_enum)]
    dtype: Option<Type>,
    /// What the owner of a 16-bit parameter keeps besides it [default: f32 if a parameter has 16 bits]
    #[arg(long, value_enum)]
    master: Option<Kept>,
    /// Type of gradients [default: the parameters']
    #[arg(long, value_enum)]
    grads: Option<Type>,
    /// Update rule, which decides the state of a parameter
    #[arg(long, value_enum, default_value_t = RuleName::Adamw)]
    optimizer: RuleName,
    /// Elements of a gradient bucket [default: that of Options]
    #[arg(long, value_name = "ELEMS", value_parser = within::<1, { 1 << 40 }>)]
    bucket: Option<usize>,
    /// Print the plan of this ZeRO stage in detail, instead of one line for each stage
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    stage: Option<u8>,
    /// Print JSON with exact bytes
    #[arg(long)]
    json: bool,
}

/// Types of parameters and gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Type {
    F32,
    F64,
    Bf16,
    F16,
}

impl From<Type> for DType {
    fn from(dtype: Type) -> DType {
        match dtype {
            Type::F32 => DType::F32,
            Type::F64 => DType::F64,
            Type::Bf16 => DType::BF16,
            Type::F16 => DType::F16,
        }
    }
}

/// What the owner of a parameter keeps besides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kept {
    /// Nothing
    None,
    /// An f32 copy: 4 bytes
    F32,
    /// The lower half of an f32 number, for bf16: 2 bytes
    Remainder,
}

/// Update rules by their state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RuleName {
    /// Two moments
    Adamw,
    /// Two moments and the largest second one
    Amsgrad,
    /// No state
    Sgd,
    /// One moment
    SgdMomentum,
    /// One moment
    Lion,
    /// One sum of squares
    Adagrad,
    /// Two moments
    Adopt,
    /// Two moments, and sums over whole tensors
    Lamb,
    /// One moment of the matrices of hidden layers, two of the other parameters, which AdamW updates
    Muon,
}

impl RuleName {
    fn groups(self) -> Groups {
        match self {
            RuleName::Adamw => AdamW::default().into(),
            RuleName::Amsgrad => AdamW { amsgrad: true, ..AdamW::default() }.into(),
            RuleName::Sgd => Sgd::default().into(),
            RuleName::SgdMomentum => Sgd { momentum: 0.9, ..Sgd::default() }.into(),
            RuleName::Lion => Lion::default().into(),
            RuleName::Adagrad => Adagrad::default().into(),
            RuleName::Adopt => Adopt::default().into(),
            RuleName::Lamb => Lamb::default().into(),
            RuleName::Muon => Groups::new(AdamW::default()).with(Muon::default(), hidden_matrices),
        }
    }
}

/// Largest number of ranks: each is visited.
const MOST_RANKS: usize = 65_536;

/// ZeRO stages by their numbers.
const STAGES: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// Prints the plan.
pub(crate) fn run(asked: &Plan, out: &mut impl Write) -> Result<()> {
    let mesh = match &asked.mesh {
        Some(mesh) => mesh.clone(),
        None => Mesh::new([(Axis::Dp, asked.ranks)])?,
    };
    let ranks = mesh.world_size();
    ensure!(ranks <= MOST_RANKS, "--mesh {mesh} has {ranks} ranks; plan at most {MOST_RANKS}");
    let f32_alone = asked.master == Some(Kept::None) && !asked.source.has_types();
    let dtype = asked.dtype.map(DType::from).or(f32_alone.then_some(DType::F32));
    let model = asked.source.model(dtype, &mesh)?;
    let is_narrow = model.parameters().iter().any(|param| matches!(param.dtype, DType::BF16 | DType::F16));
    let kept = asked.master.unwrap_or(if is_narrow { Kept::F32 } else { Kept::None });
    let grads = asked.grads.map(DType::from);
    let types = Types { kept, grads, assumed: asked.dtype.is_none() && !asked.source.has_types() };
    let plan = |stage: usize| {
        let options = asked.options(STAGES[stage], kept);
        let plan = MeshPlan::new(&mesh, &model, asked.optimizer.groups(), &options);
        plan.with_context(|| format!("stage {stage} cannot be planned"))
    };
    if let Some(stage) = asked.stage {
        let plan = plan(stage.into())?;
        match asked.json {
            true => write!(out, "{}", plan.json())?,
            false => write!(out, "{}\n\n{plan}", types.of(&model))?,
        }
        return Ok(());
    }
    let plans = Stages::of((0..STAGES.len()).map(|stage| (stage, plan(stage))))?;
    let text = if asked.json { table::json(&plans, types)? } else { table::text(&plans, types) };
    write!(out, "{text}")?;
    Ok(())
}

/// Plans of the stages that work, and the others.
struct Stages {
    plans: Vec<(usize, MeshPlan)>,
    /// Stages that cut matrices of a rule that sees them whole, and the error.
    refused: Vec<(usize, String)>,
}

impl Stages {
    /// Sorts the plans; the first error of another kind, or of all stages, is returned.
    fn of(all: impl Iterator<Item = (usize, Result<MeshPlan>)>) -> Result<Stages> {
        let mut stages = Stages { plans: Vec::new(), refused: Vec::new() };
        for (stage, plan) in all {
            match plan {
                Ok(plan) => stages.plans.push((stage, plan)),
                Err(error) if stages.plans.is_empty() => return Err(error),
                Err(error) => match error.downcast_ref() {
                    Some(meshstep_parallel3d::Error::Shard(why @ Error::NeedsWholeParams { .. })) => {
                        stages.refused.push((stage, why.to_string()));
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(stages)
    }
}

impl Plan {
    fn options(&self, stage: Stage, kept: Kept) -> Options {
        let master = match kept {
            Kept::None => Master::None,
            Kept::F32 => Master::F32,
            Kept::Remainder => Master::Remainder,
        };
        let options = Options::default();
        Options {
            stage,
            precision: Precision { master, ..Precision::default() },
            grads: self.grads.map(DType::from),
            bucket_len: self.bucket.or(options.bucket_len),
            ..options
        }
    }
}
