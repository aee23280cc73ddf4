//! Steps of one rank of a whole model at a stage, in a separate process: the rank's memory at each point of the first step,
//! and the time of each step.

use super::Result;
use super::vectors::made;
use crate::shapes;
use meshstep_comm::{Communicator, nccl};
use meshstep_optim::AdamW;
use meshstep_parallel3d::models::Gpt2;
use meshstep_shard::{Master, Optimizer, Options, Outcome, Plan, Precision, Stage, StepArgs};
use meshstep_tensor::cuda::{Device, Stream};
use meshstep_tensor::{Buffer, Category, DType, Layout, Meter, Queue, SliceMut};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Models by their names in GPU_BENCH_MODEL. The first is for stand-ins.
pub const MODELS: [(&str, Gpt2); 5] = [
    ("tiny", Gpt2 { vocab: 101, context: 16, hidden: 16, layers: 2 }),
    ("gpt2", Gpt2::SMALL),
    ("gpt2-medium", Gpt2::MEDIUM),
    ("gpt2-large", Gpt2::LARGE),
    ("gpt2-xl", Gpt2::XL),
];

/// Stages 0 to 3, in the order of their numbers.
pub const STAGES: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// Time that a rank waits in a collective for the other ranks.
const DEADLINE: Duration = Duration::from_secs(30);

/// Job of a rank, sent to the rank's process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    /// Bytes of NCCL's id, equal on all ranks.
    pub id: Vec<u8>,
    pub rank: usize,
    pub ranks: usize,
    /// Index into [`STAGES`].
    pub stage: usize,
    /// Number of steps after the first.
    pub rounds: usize,
    /// Name in [`MODELS`].
    pub model: String,
}

/// Figures that a rank's process returns.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Seconds of the first step.
    pub first: f64,
    /// Seconds of each later step.
    pub steps: Vec<f64>,
    /// Bytes at each measuring point.
    pub memory: Value,
}

/// Returns the layout of all parameters of a model, in bf16.
pub fn layout(model: &str) -> Result<Layout> {
    let named = MODELS.into_iter().find(|(name, _)| *name == model);
    let names = || MODELS.map(|(name, _)| name).join(", ");
    let (_, gpt2) =
        named.ok_or_else(|| format!("GPU_BENCH_MODEL is {model:?}; set it to one of {}", names()))?;
    Ok(shapes::layout(&gpt2.model(DType::BF16).build()?)?)
}

impl Job {
    /// Returns the optimizer's options, for the CPU.
    fn options(&self) -> Result<Options> {
        let stage = *STAGES.get(self.stage).ok_or_else(|| format!("there is no stage {}", self.stage))?;
        let precision = Precision { master: Master::F32, ..Precision::default() };
        Ok(Options { stage, precision, meter: Meter::new(), ..Options::default() })
    }

    /// Returns the planned bytes of the rank's optimizer after construction, without staging memory, which differs on a
    /// GPU.
    pub fn planned(&self) -> Result<impl Iterator<Item = (Category, u64)> + use<>> {
        let plan = Plan::new(&layout(&self.model)?, self.ranks, &self.options()?)?;
        let planned = plan.memory(self.rank, &AdamW::default()).by_category();
        Ok(planned.into_iter().filter(|(category, _)| *category != Category::Staging))
    }
}

/// Runs the steps of a job on the first GPU. Collective.
pub fn run(job: &Job) -> Result<Measured> {
    let (layout, options) = (layout(&job.model)?, job.options()?);
    let id = job.id.as_slice().try_into().map_err(|_| format!("an id has {} bytes", nccl::UniqueId::LEN))?;
    let device = Device::open(0)?;
    let settings = nccl::Options { deadline: DEADLINE, ..nccl::Options::default() };
    let comm = nccl::init(&nccl::UniqueId::from_bytes(id), job.rank, job.ranks, &device, settings)?;
    let queue = Queue::cuda(Stream::new(&device)?);
    let longest = layout.params().iter().map(|param| param.len()).max().unwrap_or(0);
    let grads = made(DType::BF16, (1, 1e-2), &(0..longest), &queue)?;
    let meter = options.meter.clone();
    let mut memory = Memory { meter, device, queue: queue.clone(), points: Map::new() };
    memory.note("before")?;
    let mut model = Model::new(Arc::new(comm), layout, grads, Options { queue, ..options })?;
    memory.note("after_construction")?;
    let begun = Instant::now();
    model.hand_over()?;
    memory.note("with_gradients")?;
    model.step()?;
    memory.queue.synchronize()?;
    let first = begun.elapsed().as_secs_f64();
    memory.note("after_step")?;
    let steps = (0..job.rounds).map(|_| {
        let begun = Instant::now();
        model.hand_over()?;
        model.step()?;
        memory.queue.synchronize()?;
        Ok(begun.elapsed().as_secs_f64())
    });
    Ok(Measured { first, steps: steps.collect::<Result<_>>()?, memory: memory.points.into() })
}

/// Recorder of a rank's memory.
struct Memory {
    meter: Meter,
    device: Device,
    queue: Queue,
    points: Map<String, Value>,
}

impl Memory {
    /// Records the memory that is held now, after synchronizing the device, and the peak since the previous point.
    fn note(&mut self, point: &str) -> Result<()> {
        self.queue.synchronize()?;
        let live = |category: Category| (category.to_string(), Value::from(self.meter.live(category)));
        let held: Map<_, _> = Category::ALL.into_iter().map(live).collect();
        let bytes = json!({
            "live": held,
            "live_total": self.meter.live_total(),
            "peak_total": self.meter.peak_total(),
            "free_on_device": self.device.free_memory()?,
        });
        self.points.insert(point.to_owned(), bytes);
        self.meter.reset_peaks();
        Ok(())
    }
}

/// An optimizer of a model, and gradients for it.
struct Model {
    opt: Optimizer,
    /// Units in backward order, each with its parameters and their lengths.
    units: Vec<(String, Vec<(String, usize)>)>,
    /// Gradients of the length of the longest parameter; each parameter's gradient is a prefix.
    grads: Buffer,
}

impl Model {
    fn new(comm: Arc<dyn Communicator>, layout: Layout, grads: Buffer, options: Options) -> Result<Self> {
        let mut units: Vec<(String, Vec<(String, usize)>)> = Vec::new();
        for param in layout.params().iter().rev() {
            let (unit, named) = (param.unit().unwrap_or_default(), (param.name().to_owned(), param.len()));
            match units.last_mut() {
                Some((last, params)) if last == unit => params.push(named),
                _ => units.push((unit.to_owned(), vec![named])),
            }
        }
        let zeros = |_: &_, _: SliceMut<'_>| Ok(());
        let opt = Optimizer::new(comm, layout, AdamW::default(), zeros, options)?;
        Ok(Model { opt, units, grads })
    }

    /// Gathers each unit as in a forward and a backward pass, and hands over its gradients.
    fn hand_over(&mut self) -> Result<()> {
        let batch = self.opt.micro_batch(1)?;
        for (unit, _) in self.units.iter().rev() {
            batch.gather(unit)?;
        }
        for (unit, params) in &self.units {
            let gathered = batch.gather(unit)?;
            for (name, len) in params {
                batch.grad(name, self.grads.as_slice().slice(0..*len)?)?;
            }
            drop(gathered);
        }
        Ok(batch.finish()?)
    }

    fn step(&mut self) -> Result<()> {
        match self.opt.step(StepArgs { max_norm: Some(1.0), ..StepArgs::default() })?.outcome()? {
            Outcome::Applied { .. } => Ok(()),
            skipped => Err(format!("a step was skipped: {skipped:?}").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_divides_more_than_the_one_before() {
        let of = |stage| {
            let model = "gpt2".to_owned();
            let job = Job { id: Vec::new(), rank: 0, ranks: 2, stage, rounds: 1, model };
            let planned = job.planned().unwrap().collect::<std::collections::HashMap<_, _>>();
            [Category::State, Category::Grads, Category::Params].map(|category| planned[&category])
        };
        let [state, grads, params] = of(0);
        assert_eq!(of(1), [state / 2, grads, params]);
        assert_eq!(of(2), [state / 2, grads / 2, params]);
        assert_eq!(of(3), [state / 2, grads / 2, params / 2]);
    }

    #[test]
    fn models_are_found_by_name() {
        let len = |model| layout(model).unwrap().params().iter().map(|param| param.len()).sum::<usize>();
        assert!(len("tiny") < 20_000);
        assert_eq!(len("gpt2-xl"), 1_557_611_200);
        let error = layout("gpt3").unwrap_err().to_string();
        assert_eq!(
            error,
            "GPU_BENCH_MODEL is \"gpt3\"; set it to one of tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl"
        );
    }
}
