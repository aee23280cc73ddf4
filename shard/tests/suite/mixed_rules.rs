//! Groups of different rules in one optimizer: the bits, norms, rates, memory and traffic of one optimizer to which a layout for each
//! rule is added, and refusals on every rank.

use crate::common::hash;
use meshstep_comm::Communicator;
use meshstep_comm::loopback::spawn;
use meshstep_optim::{AdamW, Lamb, Lion, Muon, Rule, Sgd};
use meshstep_shard::{
    DataRank, Error, Groups, NonFinite, Optimizer, Options, Outcome, Owners, ParamGroup, Part, Plan,
    RankRoles, RulePart, Sizes, Stage, StepArgs, hidden_matrices,
};
use meshstep_tensor::{Category, DType, Layout, LayoutBuilder, Meter, Param, Slice, SliceMut};
use std::sync::Arc;

/// A model's layers: unit, name and shape of each parameter.
const MODEL: [(&str, &str, &[usize]); 11] = [
    ("", "embed", &[50, 7]),
    ("h.0", "h.0.ln", &[10]),
    ("h.0", "h.0.up", &[10, 6]),
    ("h.0", "h.0.up_bias", &[6]),
    ("h.0", "h.0.down", &[6, 10]),
    ("h.1", "h.1.ln", &[10]),
    ("h.1", "h.1.up", &[30, 20]),
    ("h.1", "h.1.none", &[2, 0]),
    ("h.1", "h.1.down", &[8, 8]),
    ("end", "ln", &[10]),
    ("end", "lm_head", &[10, 5]),
];

/// Returns the model, or only the parameters that `takes` selects; the last is followed by a frozen one.
fn layout(takes: impl Fn(&str) -> bool) -> Layout {
    let add = |b: LayoutBuilder, (unit, name, shape): &(&str, &str, &[usize])| {
        let b = if unit.is_empty() { b } else { b.unit(*unit) };
        if takes(name) { b.param(*name, shape, DType::F32) } else { b }
    };
    MODEL.iter().fold(Layout::builder(), add).build().unwrap()
}

fn whole() -> Layout {
    layout(|_| true)
}

fn is_hidden(name: &str) -> bool {
    ["up", "down", "none"].iter().any(|own| name.ends_with(own))
}

/// Multiples of 1/64 below 4, whose sums over a few ranks and micro-batches are exact.
fn values(param: &Param, key: u64) -> Vec<f32> {
    let key = param.name().bytes().fold(key, |key, byte| hash(&[key, byte.into()]));
    (0..param.len()).map(|j| (hash(&[key, j as u64]) % 512) as f32 / 64.0 - 4.0).collect()
}

fn first(param: &Param, mut into: SliceMut<'_>) -> Result<(), meshstep_tensor::Error> {
    into.copy_from(Slice::from(&values(param, 1)[..]))
}

fn options(stage: Stage, bucket_len: Option<usize>) -> Options {
    Options { stage, bucket_len, meter: Meter::new(), ..Options::default() }
}

/// Gives the gradients of step `t` in the order of a backward pass, and steps.
fn step(opt: &mut Optimizer, t: u64, micro_batches: u64, at: StepArgs) -> Outcome {
    let all = whole().params().to_vec();
    for micro in 0..micro_batches {
        let last = micro + 1 == micro_batches;
        let batch = if last { opt.micro_batch(1) } else { opt.accumulate(1) }.unwrap();
        all.iter().rev().for_each(|p| batch.grad(p.name(), &values(p, t)[..]).unwrap());
        batch.finish().unwrap();
    }
    opt.step(at).unwrap().outcome().unwrap()
}

/// Returns the parameters in the model's order.
fn params(opt: &Optimizer) -> Vec<Vec<u32>> {
    let bits =
        |name: &str| opt.param(name).unwrap().typed::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
    MODEL.iter().map(|(_, name, _)| bits(name)).collect()
}

/// Rules of the hidden matrices beside AdamW, which updates biases at half of the rate.
fn others() -> Groups {
    Groups::new(AdamW { weight_decay: 0.1, ..AdamW::default() }).with_lr(
        AdamW::default(),
        0.5,
        |p: &Param| p.name().ends_with("bias"),
    )
}

fn with<R: Rule + 'static>(rule: R) -> Groups {
    others().with_lr(rule, 0.25, hidden_matrices)
}

/// Takes three steps with the optimizer that `build` returns, clipped together at `max_norm`; returns the parameters and the last step's
/// norm, which are the same on all ranks.
fn end(
    ranks: usize,
    (micro_batches, max_norm): (u64, Option<f64>),
    build: impl Fn(Arc<dyn Communicator>) -> Optimizer + Sync,
) -> (Vec<Vec<u32>>, f64) {
    let ends = spawn(ranks, |comm| {
        let mut opt = build(comm);
        let mut last = 0.0;
        for t in 1..=3 {
            let at = StepArgs { lr: 0.1, max_norm, ..StepArgs::default() };
            let outcome = step(&mut opt, t, micro_batches, at);
            let Outcome::Applied { norm, coef, .. } = outcome else { panic!("{outcome:?}") };
            assert_eq!(coef < 1.0, max_norm.is_some());
            last = norm;
        }
        (params(&opt), last)
    })
    .unwrap();
    assert!(ends.iter().all(|end| *end == ends[0]));
    ends.into_iter().next().unwrap()
}

fn one_call(
    rule: impl Rule + Clone + 'static,
    options: Options,
) -> impl Fn(Arc<dyn Communicator>) -> Optimizer {
    move |comm| Optimizer::new(comm, whole(), with(rule.clone()), first, options.clone()).unwrap()
}

fn two_calls(
    rule: impl Rule + Clone + 'static,
    options: Options,
) -> impl Fn(Arc<dyn Communicator>) -> Optimizer {
    move |comm| {
        let others = layout(|name| !is_hidden(name));
        let mut opt = Optimizer::new(comm, others, self::others(), first, options.clone()).unwrap();
        // The second group takes all parameters of this layout, at its rate.
        let hidden = Groups::new(rule.clone()).with_lr(rule.clone(), 0.25, |_: &Param| true);
        opt.add_param_group(layout(is_hidden), hidden, first).unwrap();
        opt
    }
}

/// Compares one call with a call for each rule, on one rank at stage 0 and at all `stages`.
fn one_call_is_two(rule: impl Rule + Clone + 'static, stages: &[Stage]) {
    let clipped = Some(3.0);
    let expected = end(1, (1, clipped), two_calls(rule.clone(), options(Stage::Replicated, None)));
    for &stage in stages {
        for ranks in [1, 2, 3, 4] {
            for (micro_batches, bucket_len) in [(1, None), (4, Some(100))] {
                let options = || options(stage, bucket_len);
                let one = end(ranks, (micro_batches, clipped), one_call(rule.clone(), options()));
                let two = end(ranks, (micro_batches, clipped), two_calls(rule.clone(), options()));
                assert!(one == two, "{ranks} ranks, {stage:?}, {bucket_len:?}");
                // Several micro-batches have the same mean.
                assert!(one == expected, "{ranks} ranks, {stage:?}, {bucket_len:?}");
            }
        }
    }
}

const WHOLE: Stage = Stage::WholeParams(Owners::SortedGreedy);

#[test]
fn muon_beside_adamw_in_one_call_has_the_bits_of_two() {
    one_call_is_two(Muon::default(), &[Stage::Replicated, Stage::Zero1, Stage::Zero2, WHOLE]);
}

#[test]
fn elementwise_and_layer_wise_rules_in_one_call_have_the_bits_of_two() {
    one_call_is_two(Lion::default(), &[Stage::Zero1, WHOLE]);
    one_call_is_two(Lamb::default(), &[Stage::Replicated, Stage::Zero1, Stage::Zero2]);
}

/// Buckets are reduced in the step, each just before its update.
#[test]
fn rules_are_mixed_in_steps_that_reduce() {
    for (ranks, stage) in [(2, Stage::Replicated), (3, Stage::Zero1), (4, Stage::Zero1)] {
        let non_finite = NonFinite::Propagate;
        let options = || Options { reduce_in_step: true, non_finite, ..options(stage, Some(100)) };
        let one = end(ranks, (1, None), one_call(Muon::default(), options()));
        let two = end(ranks, (1, None), two_calls(Muon::default(), options()));
        assert!(one == two, "{ranks} ranks, {stage:?}");
    }
}

/// At stage 3 parameters are gathered by unit, in the order of the whole model.
#[test]
fn rules_share_the_units_of_the_model() {
    spawn(2, |comm| {
        // The first rule has no parameter of two units.
        let of_blocks = |p: &Param| p.name().starts_with("h.");
        let rules = Groups::new(Sgd { momentum: 0.9, ..Sgd::default() }).with(AdamW::default(), of_blocks);
        let mut opt = Optimizer::new(comm, whole(), rules, first, options(Stage::Zero3, None)).unwrap();
        let names: Vec<String> = opt.units().map(str::to_owned).collect();
        assert_eq!(names, ["embed", "h.0", "h.1", "end"]);
        step(&mut opt, 1, 1, StepArgs { lr: 0.1, ..StepArgs::default() });
        let unit = opt.gather("h.0").unwrap();
        for name in ["h.0.ln", "h.0.up", "h.0.up_bias", "h.0.down"] {
            assert_eq!(unit.param(name).unwrap().len(), whole().get(name).unwrap().len());
        }
    })
    .unwrap();
}

#[test]
fn one_norm_is_of_all_gradients_and_rates_are_the_groups() {
    let at = |lr, max_norm| StepArgs { lr, max_norm, ..StepArgs::default() };
    spawn(3, |comm| {
        let of = |rules: Groups| {
            Optimizer::new(Arc::clone(&comm), whole(), rules, first, options(Stage::Zero1, None))
        };
        let mut opt = of(with(Muon::default())).unwrap();
        let outcome = step(&mut opt, 1, 1, at(0.1, None));
        let all =
            whole().params().iter().flat_map(|p| values(p, 1)).map(|g| f64::from(g).powi(2)).sum::<f64>();
        let Outcome::Applied { norm, .. } = outcome else { panic!("{outcome:?}") };
        assert_eq!(norm, all.sqrt());
        // A rate is the step's times the group's.
        let names = ["embed", "h.0.up", "h.0.up_bias"];
        let after = |rules: Groups, lr| {
            let mut opt = of(rules).unwrap();
            step(&mut opt, 1, 1, at(lr, None));
            names.map(|name| opt.param(name).unwrap().typed::<f32>().unwrap().to_vec())
        };
        let scaled = after(with(Muon::default()), 0.5);
        let [embed, ..] = after(others().with(Muon::default(), hidden_matrices), 0.5);
        let [_, up, _] = after(others().with(Muon::default(), hidden_matrices), 0.125);
        let plain = Groups::new(AdamW { weight_decay: 0.1, ..AdamW::default() });
        let bias = Groups::with(plain, AdamW::default(), |p: &Param| p.name().ends_with("bias"));
        let [.., bias] = after(bias.with(Muon::default(), hidden_matrices), 0.25);
        assert!(scaled == [embed, up, bias]);
        // No rate, no change.
        let [_, up, _] = after(others().with_lr(Muon::default(), 0.0, hidden_matrices), 0.5);
        assert_eq!(up, values(whole().get("h.0.up").unwrap(), 1));
    })
    .unwrap();
}

#[test]
fn memory_and_traffic_are_the_plans_to_the_byte() {
    let amsgrad = AdamW { amsgrad: true, ..AdamW::default() };
    let lamb = || Groups::new(amsgrad.clone()).with(Lamb::default(), hidden_matrices);
    let cases = [
        (with(Muon::default()), vec![Stage::Replicated, Stage::Zero1, Stage::Zero2, WHOLE]),
        (lamb(), vec![Stage::Replicated, Stage::Zero1, Stage::Zero2]),
        (with(Sgd::default()), vec![Stage::Zero1, Stage::Zero2]),
    ];
    for (rules, stages) in cases {
        for (stage, ranks) in stages.iter().flat_map(|&stage| [1, 2, 3, 4].map(|ranks| (stage, ranks))) {
            spawn(ranks, |comm| {
                let rank = comm.rank();
                let options = options(stage, Some(300));
                let plan = Plan::for_rules(&whole(), ranks, rules.clone(), &options).unwrap();
                let mut opt = Optimizer::new(comm, whole(), rules.clone(), first, options.clone()).unwrap();
                let at = format!("{:?}, {stage:?}, rank {rank} of {ranks}", rules.rule_names());
                for t in 1..=2 {
                    let outcome = step(&mut opt, t, 1, StepArgs { lr: 0.1, ..StepArgs::default() });
                    let Outcome::Applied { traffic, .. } = outcome else { panic!("{outcome:?}") };
                    assert_eq!(traffic.sent, plan.wire(rank, &rules).total(), "{at}");
                }
                let memory = plan.memory(rank, &rules);
                assert_eq!(options.meter.live(Category::State), memory.state, "{at}");
                assert_eq!(options.meter.peak_total(), memory.total(), "{at}");
            })
            .unwrap();
        }
    }
}

/// Buckets fill in the reverse order of the model, whichever rule they have.
#[test]
fn buckets_travel_in_the_order_of_a_backward_pass() {
    for stage in [Stage::Zero1, Stage::Zero2] {
        let plan = Plan::for_rules(&whole(), 2, with(Muon::default()), &options(stage, Some(1))).unwrap();
        let of_bucket = |&(part, bucket): &(usize, usize)| {
            let part = &plan.parts()[part];
            let full = part.buckets()[bucket].params.iter().filter(|p| p.len > 0);
            full.map(|p| part.layout().params()[p.param].name().to_owned()).collect::<Vec<_>>()
        };
        let names: Vec<String> = plan.order().iter().flat_map(of_bucket).collect();
        let all = whole();
        let full = all.params().iter().rev().filter(|p| !p.is_empty()).map(Param::name);
        assert_eq!(names, full.collect::<Vec<_>>(), "{stage:?}");
    }
}

/// One rule, in one group or in groups that other rules leave empty, is planned as before.
#[test]
fn one_rule_is_one_part() {
    let one = Groups::new(AdamW::default()).with(AdamW { eps: 1e-6, ..AdamW::default() }, ["ln"]);
    let unused = |_: &Param| false;
    let all = |p: &Param| !p.frozen();
    let cases = [
        one.clone(),
        one.clone().with(Lion::default(), unused),
        Groups::new(Lion::default()).with(AdamW::default(), all),
        // No element is updated by the second rule.
        one.clone().with(Lion::default(), ["h.1.none"]),
    ];
    for rules in cases {
        for stage in [Stage::Zero1, Stage::Zero3] {
            let options = options(stage, Some(300));
            let plan = Plan::for_rules(&whole(), 3, rules.clone(), &options).unwrap();
            assert_eq!(plan, Plan::new(&whole(), 3, &options).unwrap(), "{rules:?}");
            assert_eq!(plan.memory(1, &rules), plan.memory(1, &AdamW::default()), "{rules:?}");
        }
        let [part] = &RulePart::split(whole(), rules.clone()).unwrap()[..] else { panic!("{rules:?}") };
        assert_eq!((part.rules.rule().name(), part.indices.len()), ("adamw", MODEL.len()));
    }
}

#[test]
fn frozen_parameters_are_kept_beside_any_rules() {
    let layout = || {
        whole()
            .params()
            .iter()
            .fold(Layout::builder(), |b, p| {
                let frozen = p.name() == "h.0.up" || p.name() == "embed";
                if frozen {
                    b.frozen(p.name(), p.shape(), p.dtype())
                } else {
                    b.param(p.name(), p.shape(), p.dtype())
                }
            })
            .build()
            .unwrap()
    };
    let rules = others()
        .with(Muon::default(), ["h.0.down", "h.1.up"])
        .with(Muon { momentum: 0.9, ..Muon::default() }, ["h.1.down", "h.1.none"]);
    spawn(2, |comm| {
        let options = options(Stage::Zero2, None);
        let mut opt = Optimizer::new(comm, layout(), rules.clone(), first, options).unwrap();
        let batch = opt.micro_batch(1).unwrap();
        let trained = layout().params().iter().filter(|p| !p.frozen()).cloned().collect::<Vec<_>>();
        trained.iter().for_each(|p| batch.grad(p.name(), &values(p, 2)[..]).unwrap());
        batch.finish().unwrap();
        opt.step(StepArgs { lr: 0.1, ..StepArgs::default() }).unwrap().outcome().unwrap();
        for p in layout().params().iter().filter(|p| !p.is_empty()) {
            let now = opt.param(p.name()).unwrap().typed::<f32>().unwrap().to_vec();
            assert_eq!(now == values(p, 1), p.frozen(), "{}", p.name());
        }
    })
    .unwrap();
}

/// Returns the error of each rank.
fn refused(stage: Stage, rules: impl Fn(usize) -> Groups + Sync) -> Vec<Error> {
    spawn(3, |comm| {
        let rules = rules(comm.rank());
        Optimizer::new(comm, whole(), rules, first, options(stage, None)).unwrap_err()
    })
    .unwrap()
}

fn all(errors: Vec<Error>, is: impl Fn(&Error) -> bool) {
    errors.iter().for_each(|error| assert!(is(error), "{error}"));
}

#[test]
fn wrong_groups_are_refused_on_every_rank() {
    let muon = Muon::default;
    all(
        refused(Stage::Zero1, |_| others().with(muon(), ["h.0.up", "ln"])),
        |e| matches!(e, Error::NotAMatrix { rule: "muon", name, shape, .. } if name == "ln" && shape == &[10]),
    );
    let twice = |_| others().with(muon(), ["h.0.up"]).with(Muon { momentum: 0.9, ..muon() }, hidden_matrices);
    all(refused(Stage::Zero1, twice), |e| matches!(e, Error::InTwoGroups { name } if name == "h.0.up"));
    let two_rules = |_| others().with(muon(), hidden_matrices).with(Lion::default(), ["h.1.up"]);
    all(refused(Stage::Zero1, two_rules), |e| matches!(e, Error::InTwoGroups { name } if name == "h.1.up"));
    all(
        refused(Stage::Zero1, |_| others().with(muon(), ["h.0.op"])),
        |e| matches!(e, Error::UnknownParam { name, .. } if name == "h.0.op"),
    );
    let differs =
        |rank| others().with(muon(), move |p: &Param| hidden_matrices(p) && (rank != 1 || p.len() != 64));
    all(refused(Stage::Zero1, differs), |e| {
        e.to_string() == "ranks disagree on rule of \"h.1.down\": rank 0 has muon, rank 1 has adamw"
    });
    let rates = |rank| others().with_lr(muon(), if rank == 2 { 0.5 } else { 1.0 }, hidden_matrices);
    all(refused(Stage::Zero1, rates), |e| {
        e.to_string() == "ranks disagree on lr_scale of group 0: rank 0 has 1, rank 2 has 0.5"
    });
}

/// A part that is planned by hand has one rule.
#[test]
fn a_part_of_two_rules_is_refused_on_every_rank() {
    let errors = spawn(2, |comm| {
        let options = options(Stage::Zero1, None);
        let mut opt = Optimizer::empty(Arc::clone(&comm), DataRank::OWN, options.clone()).unwrap();
        let part = Part::new(whole(), Sizes::all(2), [], &options).unwrap();
        let group = ParamGroup { part, rules: with(Lion::default()), among: RankRoles::all(comm) };
        opt.add_parts(vec![group], first).unwrap_err()
    });
    all(errors.unwrap(), |e| matches!(e, Error::MixedRules { first: "adamw", other: "lion" }));
}
