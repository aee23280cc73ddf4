//! A whole step, from gradients to parameters, as one graph: measured, decided and applied repeatedly.

use crate::common::{self, Memory, RECIPES, Recipe, Values};
use crate::cuda::gpu::queue;
use crate::cuda::update::There;
use meshstep_optim::cuda::{Decided, Decision, FIELDS, Group, Progress, Settings, Update, Verdict};
use meshstep_optim::{AdamW, DynamicLossScale, Error, ExactSum, LossScale, Norm, NormSum, Segment};
use meshstep_tensor::cuda::{Graph, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};

/// Lengths of the buckets of gradients.
const LENS: [usize; 3] = [4099, 129, 700];
const RECIPE: Recipe = RECIPES[2];
/// Step with a gradient that is not finite.
const BAD: u64 = 3;

/// Memory and state of a step.
struct Whole {
    queue: Queue,
    start: Vec<Memory>,
    norm: NormSum,
    decision: Decision,
    sum: Buffer,
    max: Buffer,
    buckets: Vec<(There, Update)>,
}

fn scaling() -> LossScale {
    LossScale::Dynamic(DynamicLossScale {
        init_scale: 8.0,
        growth_interval: 2,
        ..DynamicLossScale::default()
    })
}

/// Returns the settings of step `t`: a different rate each time, and a different norm in the last steps.
fn settings(t: u64) -> Settings {
    let max_norm = if t < 6 { 0.5 } else { 1e-2 };
    Settings { lr: 0.01 * t as f64, max_norm, ..Settings::default() }.with_loss_scale(Some(&scaling()))
}

/// Returns the gradients of step `t`, of a loss scaled by 8.
fn gradients(start: &Memory, t: u64, bucket: usize) -> Values {
    let mut random = common::Random::new(t * 10 + bucket as u64);
    let len = start.grads.bits().len();
    let mut at = 0;
    Values::new(RECIPE.grads, len, || {
        at += 1;
        if t == BAD && bucket == 1 && at == 100 { f64::NAN } else { random.unit() - 0.5 }
    })
}

impl Whole {
    fn new(queue: &Queue) -> Self {
        let meter = Meter::new();
        let words = |n| Buffer::zeroed_on(queue, n, DType::U64, &meter, Category::Staging).unwrap();
        let rule = AdamW::default();
        let memory = |(i, &len): (usize, &usize)| Memory::of(&rule, &RECIPE, len, i as u64);
        let start: Vec<Memory> = LENS.iter().enumerate().map(memory).collect();
        let bucket = |start: &Memory| {
            let len = start.grads.bits().len();
            let (mut there, halves) = (
                There::new(start, queue),
                [vec![Segment::new(0..len / 2, 1)], vec![Segment::new(len / 2..len, 4)]],
            );
            let group =
                |i: usize| Group { rule: &rule, lr_scale: [1.0, 0.5][i], segments: &halves[i], params: &[] };
            let groups = [group(0), group(1)];
            let update = there.flat(0, |flat| Update::new(&flat, &groups, RECIPE.rounding, queue, &meter));
            (there, update.unwrap())
        };
        let buckets = start.iter().map(bucket).collect();
        let progress = Progress::new(0, Some(scaling().start()));
        Whole {
            queue: queue.clone(),
            norm: NormSum::new(Norm::L2, queue, &meter).unwrap(),
            decision: Decision::new(&progress, 0, queue, &meter).unwrap(),
            sum: words(3 + ExactSum::WORDS),
            max: words(4 + 2 * FIELDS),
            buckets,
            start,
        }
    }

    /// Takes a step without any work of the host.
    fn step(&mut self) -> Result<(), Error> {
        let Whole { queue, norm, decision, sum, max, buckets, .. } = self;
        norm.reset(queue)?;
        for (there, _) in buckets.iter() {
            norm.add(there.grads.as_slice(), queue)?;
        }
        norm.write(sum.as_mut(), max.as_mut(), queue)?;
        decision.bring(sum.as_mut(), max.as_mut(), queue)?;
        decision.decide(sum.as_slice(), max.as_slice(), queue)?;
        for (there, update) in buckets {
            there.flat(0, |flat| update.run(flat, decision.step(), queue))?;
        }
        Ok(())
    }

    /// Lets the norm create its tables.
    fn measured(mut self) -> Self {
        for (there, _) in &self.buckets {
            self.norm.add(there.grads.as_slice(), &self.queue).unwrap();
        }
        self
    }

    fn stream(&self) -> Stream {
        self.queue.stream().unwrap().clone()
    }

    /// Sets the gradients and settings of step `t`.
    fn begin(&mut self, t: u64) {
        for (i, (there, _)) in self.buckets.iter_mut().enumerate() {
            there.set_grads(&gradients(&self.start[i], t, i), &self.queue);
        }
        self.decision.set(&settings(t), [], &self.queue).unwrap();
    }

    fn launch(&mut self, graph: &Graph) {
        // SAFETY: all captured memory lives in `self`, and only later calls on the same queue use it.
        unsafe { graph.launch(self.queue.stream().unwrap()) }.unwrap();
    }

    fn decided(&self) -> Decided {
        self.decision.answer(&self.queue).unwrap().read().unwrap()
    }

    /// Returns all memory, the step count of each segment, and the progress.
    fn end(&self) -> (Vec<Memory>, Vec<Vec<u64>>, Progress) {
        let pairs = self.buckets.iter().zip(&self.start);
        let memory = pairs.map(|((there, _), start)| there.back(start, &self.queue)).collect();
        let steps = self.buckets.iter().map(|(_, update)| update.steps(&self.queue).unwrap()).collect();
        (memory, steps, self.decision.progress(&self.queue).unwrap())
    }
}

/// Describes the first difference between the ends of two runs.
fn apart(a: &Whole, b: &Whole) -> Option<String> {
    let ((a, a_steps, a_progress), (b, b_steps, b_progress)) = (a.end(), b.end());
    let memory = a.iter().zip(&b).find_map(|(a, b)| common::difference(a, b));
    let (a, b) = ((a_steps, a_progress), (b_steps, b_progress));
    memory.or_else(|| (a != b).then(|| format!("{a:?}\n{b:?}")))
}

#[test]
fn a_whole_step_replayed_equals_the_step_launched() {
    let Some(queue) = queue() else { return };
    let (mut direct, mut replayed) = (Whole::new(&queue), Whole::new(&queue).measured());
    let graph = replayed.stream().capture(|| replayed.step()).unwrap();
    assert_eq!(apart(&direct, &replayed), None, "nothing is done by a capture");
    let mut verdicts = Vec::new();
    for t in 1..=8 {
        let before = direct.end();
        [&mut direct, &mut replayed].into_iter().for_each(|run| run.begin(t));
        direct.step().unwrap();
        replayed.launch(&graph);
        assert_eq!(apart(&direct, &replayed), None, "step {t}");
        let decided = direct.decided();
        assert_eq!(replayed.decided(), decided, "step {t}");
        let skipped = decided.verdict == Verdict::Skipped as u32;
        let same = before.0.iter().zip(&direct.end().0).all(|(a, b)| common::difference(a, b).is_none());
        // The gradients of a skipped step differ.
        assert_eq!(direct.end().1 == before.1, skipped, "step {t}");
        assert!(!same);
        verdicts.push((decided.verdict, decided.non_finite, decided.coef < 1.0));
    }
    let applied = (Verdict::Applied as u32, 0, true);
    assert_eq!(verdicts[..4], [applied, applied, (Verdict::Skipped as u32, 1, false), applied]);
    let (_, steps, progress) = replayed.end();
    assert_eq!(steps, vec![vec![7, 10]; 3]);
    // Doubled after two steps, halved by the skip, doubled after two more steps and again after another two.
    assert_eq!((progress.steps, progress.scale, progress.growth_tracker), (8, 8.0 * 2.0 / 2.0 * 4.0, 1));
}

#[test]
fn replays_one_after_the_other_need_no_word_of_the_host() {
    let Some(queue) = queue() else { return };
    let (mut direct, mut replayed) = (Whole::new(&queue).measured(), Whole::new(&queue).measured());
    let graph = replayed.stream().capture(|| replayed.step()).unwrap();
    [&mut direct, &mut replayed].into_iter().for_each(|run| run.begin(1));
    let waits = meshstep_tensor::cuda::waits();
    for round in 0..20 {
        for (run, graph) in [(&mut direct, None), (&mut replayed, Some(&graph))] {
            run.decision.set(&settings(round % 8), [], &queue).unwrap();
            match graph {
                Some(graph) => run.launch(graph),
                None => run.step().unwrap(),
            }
        }
    }
    assert_eq!(meshstep_tensor::cuda::waits(), waits);
    assert_eq!(apart(&direct, &replayed), None);
    assert_eq!(replayed.end().2.steps, 20);
}

#[test]
fn what_the_host_takes_part_in_is_no_part_of_a_graph() {
    let Some(queue) = queue() else { return };
    let mut whole = Whole::new(&queue);
    let stream = whole.stream();
    let capturing = |error: &Error| error.to_string().contains("before the capture");
    let told = stream.capture(|| whole.step()).unwrap_err();
    assert!(capturing(&told), "a norm that has met no such vector: {told}");
    let mut whole = whole.measured();
    let graph = stream.capture(|| {
        for told in [
            whole.decision.set(&settings(1), [], &queue).unwrap_err(),
            whole.decision.answer(&queue).map(drop).unwrap_err(),
            whole.decision.progress(&queue).map(drop).unwrap_err(),
            whole.decision.set_progress(&Progress::new(0, None), &queue).unwrap_err(),
            whole.norm.read(&queue).map(drop).unwrap_err(),
        ] {
            assert!(capturing(&told), "{told}");
        }
        whole.step()
    });
    // The refused captures left everything intact.
    let mut direct = Whole::new(&queue);
    [&mut direct, &mut whole].into_iter().for_each(|run| run.begin(1));
    direct.step().unwrap();
    whole.launch(&graph.unwrap());
    assert_eq!(apart(&direct, &whole), None);
}
