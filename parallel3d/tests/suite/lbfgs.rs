//! L-BFGS on meshes takes the same iterates as one rank, for any placement.

use crate::common::{TOKENS, held_at, model};
use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{Lbfgs, LineSearch};
use meshstep_parallel3d::{Axis, Coordinate, Mesh, Model, Parameter, Piece, ShardedLbfgs};
use meshstep_shard::{Combine, Error, MicroBatch, Options, Stage};
use meshstep_tensor::DType::F64;
use meshstep_tensor::{Buffer, Category, Meter, Slice, SliceMut};
use std::sync::Arc;

/// (dp, tp, cp) of (2,2,2), (1,4,2), (2,1,4), (8,1,1), and replicas of shards.
const MESHES: [&str; 6] =
    ["tp=2,cp=2,dp=2", "tp=4,cp=2", "cp=4,dp=2", "dp=8", "tp=8", "dp_replicate=2,dp_shard=2,tp=2"];
const STAGES: [Stage; 4] = [Stage::Replicated, Stage::Zero1, Stage::Zero2, Stage::Zero3];

/// Objective: the mean over tokens of a function of each element of the whole parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Problem {
    /// Curvatures of 1 to 40, plus fourth powers.
    Smooth,
    /// Integer gradients and losses: their sums are exact in every order.
    Whole,
}

impl Problem {
    /// Returns the loss and its derivative for element `i` with value `w`, for a token.
    fn at(self, parameter: &Parameter, i: usize, token: usize, w: f64) -> (f64, f64) {
        let salt: usize = parameter.name.bytes().map(usize::from).sum();
        let target = ((i * 7 + token * 13 + salt * 3) % 23) as f64 - 11.0;
        let curvature = 1.0 + ((i * 5 + salt) % 40) as f64;
        let x = w - target;
        match self {
            Problem::Smooth => (curvature * x * x / 2.0 + 0.01 * x.powi(4), curvature * x + 0.04 * x.powi(3)),
            Problem::Whole => {
                let slope = (curvature * x).round().clamp(-1e6, 1e6);
                ((curvature * x * x / 2.0).min(1e9).round(), slope)
            }
        }
    }
}

/// Returns a rank's factor of the whole gradient, as in `common::gradient`: for parts to sum or to average.
fn part_of(parameter: &Parameter, mesh: &Mesh, at: &Coordinate) -> f64 {
    let tp = mesh.degree(Axis::Tp) as f64;
    match (parameter.name.as_str(), at.along(Axis::Tp)) {
        ("ln", 0) => (tp + 1.0) / (2.0 * tp),
        ("ln", _) => 1.0 / (2.0 * tp),
        ("qk_norm", 0) => (tp + 1.0) / 2.0,
        ("qk_norm", _) => 0.5,
        _ => 1.0,
    }
}

/// Data and coordinate of one rank.
struct Rank<'a> {
    model: &'a Model,
    mesh: &'a Mesh,
    at: Coordinate,
    along_tp: Arc<dyn Communicator>,
    problem: Problem,
}

impl Rank<'_> {
    fn tokens(&self) -> std::ops::Range<usize> {
        let place =
            self.mesh.place(&self.at, Axis::Dp) * self.mesh.degree(Axis::Cp) + self.at.along(Axis::Cp);
        let own = TOKENS / self.mesh.degree(Axis::Dp | Axis::Cp);
        place * own..(place + 1) * own
    }

    /// Hands over this rank's gradients and returns the loss of its tokens, the same along tp.
    fn evaluate(&self, mb: &MicroBatch<'_>, units: &[String]) -> Result<f64, Error> {
        let (tokens, mut loss) = (self.tokens(), 0.0);
        for unit in units.iter().rev() {
            let here = mb.gather(unit)?;
            for parameter in self.model.parameters() {
                let Ok(values) = here.param(&parameter.name) else { continue };
                let w = values.typed::<f64>()?;
                let part = part_of(parameter, self.mesh, &self.at);
                let counts = parameter.placement.sharing(self.mesh).replicas;
                let counts = self.at.along(Axis::Tp) == 0 || !counts.contains(Axis::Tp);
                let mut grad = vec![0.0; w.len()];
                for ((g, &w), i) in grad.iter_mut().zip(w).zip(held_at(parameter, self.mesh, &self.at)) {
                    for token in tokens.clone() {
                        let (of, slope) = self.problem.at(parameter, i, token, w);
                        loss += if counts { of } else { 0.0 };
                        *g += slope;
                    }
                    *g *= part / tokens.len() as f64;
                }
                mb.grad(&parameter.name, &grad[..])?;
            }
        }
        let mut sum = Buffer::zeroed(1, F64, &Meter::new(), Category::Framework)?;
        sum.as_mut().typed_mut::<f64>()?[0] = loss;
        self.along_tp.all_reduce(&mut sum, meshstep_comm::Reduction::Sum)?;
        Ok(sum.as_slice().typed::<f64>()?[0] / tokens.len() as f64)
    }
}

fn first(
    parameter: &Parameter,
    pieces: &[Piece],
    mut values: SliceMut<'_>,
) -> Result<(), meshstep_tensor::Error> {
    let held = crate::common::held(parameter, pieces);
    let own: Vec<f64> =
        held.into_iter().map(|i| ((i * 5 + parameter.name.len()) % 13) as f64 - 6.0).collect();
    values.copy_from(Slice::from(&own[..]))
}

/// Whole parameters, losses of all iterates, and number of evaluations.
type Run = (Vec<Vec<f64>>, Vec<f64>, u64);

fn made(
    world: Arc<dyn Communicator>,
    model: &Model,
    mesh: &Mesh,
    rule: &Lbfgs,
    stage: Stage,
) -> ShardedLbfgs {
    let options = Options { stage, bucket_len: Some(40), ..Options::default() };
    ShardedLbfgs::new(world, mesh.clone(), model, rule.clone(), first, options).unwrap()
}

fn run(mesh: &str, stage: Stage, rule: &Lbfgs, problem: Problem) -> Run {
    let (mesh, model): (Mesh, Model) = (mesh.parse().unwrap(), model(F64));
    let ranks = loopback::spawn(mesh.world_size(), |world| {
        let mut opt = made(Arc::clone(&world), &model, &mesh, rule, stage);
        let rank = rank(&world, &model, &mesh, problem);
        let units: Vec<String> = opt.optimizer().units().map(str::to_owned).collect();
        let minimized = opt.minimize(|mb| rank.evaluate(mb, &units)).unwrap();
        let losses: Vec<f64> = minimized.history.iter().map(|at| at.loss).collect();
        let held = whole_of(&opt, &model, &mesh);
        opt.verify().unwrap();
        (held, losses, minimized.evaluations)
    });
    together(&model, ranks.unwrap())
}

fn rank<'a>(world: &Arc<dyn Communicator>, model: &'a Model, mesh: &'a Mesh, problem: Problem) -> Rank<'a> {
    let at = mesh.coordinate(world.rank()).unwrap();
    let colour = mesh.group(world.rank(), Axis::Tp).unwrap().ranks().next().unwrap() as u32;
    let along_tp = world.split(Some(colour), 0).unwrap().unwrap();
    Rank { model, mesh, at, along_tp, problem }
}

/// A rank's part of each parameter, with its indices in the whole.
type Held = Vec<(Vec<usize>, Vec<f64>)>;

fn whole_of(opt: &ShardedLbfgs, model: &Model, mesh: &Mesh) -> Held {
    let of = |p: &Parameter| {
        let unit = opt.optimizer().gather(opt.optimizer().unit_of(&p.name).unwrap().unwrap()).unwrap();
        let values = unit.param(&p.name).unwrap().typed::<f64>().unwrap().to_vec();
        (held_at(p, mesh, opt.coordinate()), values)
    };
    model.parameters().iter().map(of).collect()
}

fn together(model: &Model, ranks: Vec<(Held, Vec<f64>, u64)>) -> Run {
    let mut whole: Vec<Vec<f64>> =
        model.parameters().iter().map(|p| vec![f64::NAN; p.shape.iter().product()]).collect();
    for (params, losses, evaluations) in &ranks {
        assert_eq!((losses, evaluations), (&ranks[0].1, &ranks[0].2), "ranks part");
        for (whole, (held, values)) in whole.iter_mut().zip(params) {
            for (&i, &value) in held.iter().zip(values) {
                assert!(whole[i].is_nan() || whole[i].to_bits() == value.to_bits(), "copies part");
                whole[i] = value;
            }
        }
    }
    let (_, losses, evaluations) = ranks.into_iter().next().unwrap();
    (whole, losses, evaluations)
}

fn rules() -> [Lbfgs; 2] {
    let fixed = Lbfgs { lr: 0.5, max_iter: 12, history_len: 6, ..Lbfgs::default() };
    [Lbfgs { line_search: LineSearch::StrongWolfe, max_iter: 9, ..fixed.clone() }, fixed]
}

/// Every mesh and stage; short runs try some of them.
fn arrangements() -> impl Iterator<Item = (&'static str, Stage)> {
    let all = (0..MESHES.len() * STAGES.len()).filter(|&i| meshstep_cases::tried(i, 2));
    all.map(|i| (MESHES[i % MESHES.len()], STAGES[i / MESHES.len()]))
}

#[test]
fn a_mesh_takes_the_steps_of_one_rank() {
    for rule in rules() {
        let expected = run("tp=1", Stage::Replicated, &rule, Problem::Smooth);
        assert!(expected.1.len() > 5 && expected.1.last() < expected.1.first(), "{:?}", expected.1);
        for (mesh, stage) in arrangements() {
            let (params, losses, evaluations) = run(mesh, stage, &rule, Problem::Smooth);
            let what = format!("{mesh} {stage:?} {:?}", rule.line_search);
            assert_eq!((losses.len(), evaluations), (expected.1.len(), expected.2), "{what}");
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-9 * b.abs().max(1.0);
            assert!(losses.iter().zip(&expected.1).all(near), "{what}: {losses:?}");
            let (params, others) = (params.iter().flatten(), expected.0.iter().flatten());
            assert!(params.zip(others).all(near), "{what}");
        }
    }
}

#[test]
fn exact_sums_give_the_same_bits_on_every_mesh() {
    for rule in rules() {
        let expected = run("tp=1", Stage::Replicated, &rule, Problem::Whole);
        for (mesh, stage) in arrangements() {
            let got = run(mesh, stage, &rule, Problem::Whole);
            assert_eq!(got, expected, "{mesh} {stage:?} {:?}", rule.line_search);
        }
    }
}

/// A sum of losses also counts each micro-batch once.
#[test]
fn a_sum_counts_the_loss_of_a_micro_batch_once() {
    let model =
        Model::builder().param("w", &[4], F64, meshstep_parallel3d::Placement::whole()).build().unwrap();
    for (combine, expected) in [(Combine::Mean, 8.0), (Combine::Sum, 16.0)] {
        let losses = loopback::spawn(4, |world| {
            let options = Options { combine, ..Options::default() };
            let (mesh, rule) = ("tp=2,dp=2".parse().unwrap(), Lbfgs { max_iter: 1, ..Lbfgs::default() });
            let mut opt = ShardedLbfgs::new(world, mesh, &model, rule, |_, _, _| Ok(()), options).unwrap();
            // A rank with a loss that does not count may return anything.
            let counts = opt.coordinate().along(Axis::Tp) == 0;
            let step = opt.step(|mb| {
                mb.grad("w", &[2f64; 4][..])?;
                Ok::<_, Error>(if counts { 8.0 } else { f64::NAN })
            });
            step.unwrap().report.first_loss
        });
        assert_eq!(losses.unwrap(), [expected; 4], "{combine:?}");
    }
}

/// A run saved half way on one mesh and continued on another ends like an uninterrupted one.
#[cfg(feature = "checkpoint")]
#[test]
fn a_history_goes_on_on_another_mesh() {
    use meshstep_checkpoint::{self as checkpoint, Load, Save, Store};
    let model = model(F64);
    let rule = Lbfgs { max_iter: 5, ..rules()[1].clone() };
    let steps = |store: &Store, mesh: &str, stage: Stage, first: bool, last: bool| {
        let mesh: Mesh = mesh.parse().unwrap();
        let ranks = loopback::spawn(mesh.world_size(), |world| {
            let mut opt = made(Arc::clone(&world), &model, &mesh, &rule, stage);
            let rank = rank(&world, &model, &mesh, Problem::Whole);
            let units: Vec<String> = opt.optimizer().units().map(str::to_owned).collect();
            let mut losses = Vec::new();
            if first {
                losses.push(opt.step(|mb| rank.evaluate(mb, &units)).unwrap().report.loss);
                checkpoint::save(&mut opt, store, Save::default()).unwrap();
            } else {
                checkpoint::load(&mut opt, store, Load::default()).unwrap();
            }
            if last {
                losses.push(opt.step(|mb| rank.evaluate(mb, &units)).unwrap().report.loss);
            }
            (whole_of(&opt, &model, &mesh), losses, 0)
        });
        together(&model, ranks.unwrap())
    };
    let store = |dir: &tempfile::TempDir| Store::new(dir.path());
    let dir = tempfile::tempdir().unwrap();
    let (expected, losses, _) = steps(&store(&dir), "tp=1", Stage::Replicated, true, true);
    for (from, to) in [(MESHES[0], MESHES[1]), (MESHES[5], MESHES[3]), ("tp=1", MESHES[2])] {
        let dir = tempfile::tempdir().unwrap();
        steps(&store(&dir), from, Stage::Zero3, true, false);
        let (params, last, _) = steps(&store(&dir), to, Stage::Zero1, false, true);
        assert_eq!((&params, last[0]), (&expected, losses[1]), "{from} to {to}");
    }
}

/// A failing closure on one rank stops all ranks, and the mesh stays usable.
#[test]
fn a_closure_that_fails_on_one_rank_fails_on_all() {
    let (mesh, model): (Mesh, Model) = (MESHES[0].parse().unwrap(), model(F64));
    let told = loopback::spawn(8, |world| {
        let mut opt = made(Arc::clone(&world), &model, &mesh, &rules()[0], Stage::Zero2);
        let own = rank(&world, &model, &mesh, Problem::Whole);
        let units: Vec<String> = opt.optimizer().units().map(str::to_owned).collect();
        let failed = opt.step(|mb| {
            let loss = own.evaluate(mb, &units).map_err(|error| error.to_string())?;
            if world.rank() == 5 { Err("no data".to_owned()) } else { Ok(loss) }
        });
        let failed = failed.unwrap_err().to_string();
        opt.step(|mb| own.evaluate(mb, &units)).unwrap();
        failed
    });
    for (rank, told) in told.unwrap().iter().enumerate() {
        assert!(told.contains(if rank == 5 { "no data" } else { "rank 5" }), "{told}");
    }
}
