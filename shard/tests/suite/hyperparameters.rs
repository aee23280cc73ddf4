//! A rule that differs on one rank, in any field of any rule, is refused at construction; if it changes later, the next step and
//! `verify` find and name the difference.

use meshstep_comm::{Communicator, loopback};
use meshstep_optim::{
    Adagrad, Adam, AdamW, Adjust, Adopt, Blocks, Decay, Flat, Isa, Lamb, Lars, Lion, Moments, Momentum, Muon,
    QhAdamW, QhAdopt, RmsProp, Rule, Scalars, ScheduleFreeAdamW, Sees, Segment, Sgd, StateSlot, TensorSums,
    UncorrectedAdam,
};
use meshstep_shard::{Error, Optimizer, Options, Owners, Stage, StepArgs};
use meshstep_tensor::{DType, Layout, Queue};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// A user's rule, without kernels, that becomes another one when a flag is set.
#[derive(Clone, Debug)]
struct Switched {
    rules: [Arc<dyn Rule>; 2],
    second: Arc<AtomicBool>,
    /// True if it reports its hyperparameters.
    tells: bool,
}

impl Switched {
    fn rule(&self) -> &dyn Rule {
        &*self.rules[usize::from(self.second.load(SeqCst))]
    }
}

impl Rule for Switched {
    fn name(&self) -> &'static str {
        self.rule().name()
    }

    fn state(&self) -> &'static [&'static str] {
        self.rule().state()
    }

    fn check(&self) -> Result<(), meshstep_optim::Error> {
        self.rule().check()
    }

    fn each_hyperparameter(&self, each: &mut dyn FnMut(&'static str, f64)) {
        if self.tells {
            self.rule().each_hyperparameter(each);
        }
    }

    fn sees(&self) -> Sees {
        self.rule().sees()
    }

    fn blocks(&self) -> Blocks {
        self.rule().blocks()
    }

    fn slot(&self, slot: usize) -> StateSlot {
        self.rule().slot(slot)
    }

    fn measure_on(
        &self,
        isa: Isa,
        flat: &Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        sums: &mut [TensorSums],
        queue: &Queue,
    ) -> Result<(), meshstep_optim::Error> {
        self.rule().measure_on(isa, flat, segments, scalars, sums, queue)
    }

    fn reach(&self, lr: f64, matrix: Option<(usize, usize)>) -> f64 {
        self.rule().reach(lr, matrix)
    }

    fn ratio(&self, sums: &TensorSums) -> f64 {
        self.rule().ratio(sums)
    }

    fn update_on(
        &self,
        isa: Isa,
        flat: Flat<'_, '_>,
        segments: &[Segment],
        scalars: &Scalars,
        queue: &Queue,
    ) -> Result<(), meshstep_optim::Error> {
        self.rule().update_on(isa, flat, segments, scalars, queue)
    }
}

/// Field that differs, and the two rules.
type Case = (&'static str, [Arc<dyn Rule>; 2]);

/// Cases of a rule with one field changed at a time, named as in the error.
macro_rules! changed {
    ($rule:ident, $base:expr; $($field:ident: $value:expr => $told:literal),* $(,)?) => {
        [$(($told, [Arc::new($base) as Arc<dyn Rule>, Arc::new($rule { $field: $value, ..$base }) as Arc<dyn Rule>])),*]
    };
}

/// Cases of the fields that every element-wise rule has, and of `own` ones.
macro_rules! elementwise {
    ($rule:ident, $base:expr; $($own:tt)*) => {
        changed!($rule, $rule { decay: Decay::FullyDecoupled { lr_max: 0.5 }, ..$base };
            weight_decay: 0.375 => "weight_decay",
            decay: Decay::Coupled => "decay",
            decay: Decay::FullyDecoupled { lr_max: 0.25 } => "lr_max",
            maximize: true => "maximize",
            $($own)*
        )
    };
}

fn elementwise() -> Vec<Case> {
    let two = |beta, weight| Moments::new(&[(0.9, 0.3), (beta, weight)]).unwrap();
    let torch = Sgd { momentum: 0.9, ..Sgd::default() };
    let average = Sgd { form: Momentum::Average { debias: false }, ..torch.clone() };
    let qh_adopt = QhAdopt { moments: two(0.99, 0.5), ..QhAdopt::default() };
    let qh_adamw = QhAdamW { moments: two(0.99, 0.5), ..QhAdamW::default() };
    let all: Vec<Vec<Case>> = vec![
        elementwise!(AdamW, AdamW::default(); beta1: 0.5 => "beta1", beta2: 0.5 => "beta2", eps: 0.5 => "eps", amsgrad: true => "amsgrad").into(),
        elementwise!(Adam, Adam::default(); beta1: 0.5 => "beta1", beta2: 0.5 => "beta2", eps: 0.5 => "eps", amsgrad: true => "amsgrad").into(),
        elementwise!(Sgd, Sgd::default(); momentum: 0.5 => "momentum").into(),
        elementwise!(Sgd, torch.clone(); momentum: 0.5 => "momentum", dampening: 0.5 => "dampening", nesterov: true => "nesterov", form: Momentum::LrInside => "form").into(),
        elementwise!(Sgd, average.clone(); form: Momentum::Average { debias: true } => "debias").into(),
        elementwise!(RmsProp, RmsProp::default(); alpha: 0.5 => "alpha", eps: 0.5 => "eps", momentum: 0.5 => "momentum", centered: true => "centered").into(),
        elementwise!(Adagrad, Adagrad::default(); lr_decay: 0.5 => "lr_decay", initial_accumulator_value: 0.5 => "initial_accumulator_value", eps: 0.5 => "eps").into(),
        elementwise!(Lion, Lion::default(); beta1: 0.5 => "beta1", beta2: 0.5 => "beta2").into(),
        elementwise!(Adopt, Adopt::default(); beta1: 0.5 => "beta1", beta2: 0.5 => "beta2", eps: 0.5 => "eps").into(),
        elementwise!(QhAdopt, qh_adopt.clone(); moments: Moments::one(0.9, 0.3) => "beta1 of m1", moments: two(0.5, 0.5) => "beta1 of m1", moments: two(0.99, 0.25) => "weight of m1", beta2: 0.5 => "beta2", eps: 0.5 => "eps").into(),
        elementwise!(QhAdamW, qh_adamw.clone(); moments: Moments::one(0.9, 0.3) => "beta1 of m1", moments: two(0.5, 0.5) => "beta1 of m1", moments: two(0.99, 0.25) => "weight of m1", beta2: 0.5 => "beta2", eps: 0.5 => "eps").into(),
        elementwise!(UncorrectedAdam, UncorrectedAdam::default(); beta1: 0.5 => "beta1", beta2: 0.5 => "beta2", lambda: 0.5 => "lambda", clip: 0.5 => "clip").into(),
        changed!(ScheduleFreeAdamW, ScheduleFreeAdamW::default(); beta1: 0.5 => "beta1", beta2: 0.5 => "beta2", eps: 0.5 => "eps", warmup_steps: 5 => "warmup_steps", r: 0.5 => "r", weight_lr_power: 1.0 => "weight_lr_power", weight_decay: 0.5 => "weight_decay", maximize: true => "maximize").into(),
    ];
    all.concat()
}

fn layer_wise() -> Vec<Case> {
    let [a, b, c] = Muon::default().ns_coefficients;
    let all: Vec<Vec<Case>> = vec![
        changed!(Lamb, Lamb::default(); beta1: 0.5 => "beta1", beta2: 0.5 => "beta2", eps: 0.5 => "eps", weight_decay: 0.5 => "weight_decay", maximize: true => "maximize").into(),
        changed!(Lars, Lars::default(); momentum: 0.5 => "momentum", weight_decay: 0.5 => "weight_decay", trust_coefficient: 0.5 => "trust_coefficient", maximize: true => "maximize").into(),
        changed!(Muon, Muon::default();
            momentum: 0.5 => "momentum",
            nesterov: false => "nesterov",
            decaying_sum: true => "decaying_sum",
            weight_decay: 0.5 => "weight_decay",
            ns_coefficients: [3.0, b, c] => "ns_a",
            ns_coefficients: [a, -4.0, c] => "ns_b",
            ns_coefficients: [a, b, 2.0] => "ns_c",
            ns_steps: 3 => "ns_steps",
            eps: 0.5 => "eps",
            add_eps: true => "add_eps",
            blocks: Blocks::Rows(2) => "blocks",
            adjust: Adjust::MatchRmsAdamW => "match_rms_adamw",
            maximize: true => "maximize",
        ).into(),
    ];
    all.concat()
}

fn build(comm: Arc<dyn Communicator>, rule: Switched) -> Result<Optimizer, Error> {
    let layout = Layout::builder().param("w", &[6, 4], DType::F32).build().unwrap();
    let options = Options { stage: Stage::WholeParams(Owners::RoundRobin), ..Options::default() };
    Optimizer::new(comm, layout, rule, |_, mut w| w.copy_from((&[0.5f32; 24][..]).into()), options)
}

fn step(opt: &mut Optimizer) -> Result<(), Error> {
    let mb = opt.micro_batch(1)?;
    mb.grad("w", &[0.25f32; 24][..])?;
    mb.finish()?;
    opt.step(StepArgs::default())?.outcome().map(drop)
}

fn assert_told(rules: &Switched, what: &str, error: &Error) {
    let what = format!("{what} of group 0");
    let told = matches!(error, Error::Disagree { what: told, rank: 1, .. } if *told == what);
    assert!(told, "{what}, {rules:?}: {error}");
}

/// One rank has the second rule, from the start or after a step. Nothing has changed at the error, and with the first rule back
/// the run continues.
fn differ(what: &str, rules: &[Arc<dyn Rule>; 2], tells: bool) {
    loopback::spawn(2, |comm| {
        let second = |second| Arc::new(AtomicBool::new(second));
        let odd = comm.rank() == 1;
        let rule = Switched { rules: rules.clone(), second: second(odd), tells };
        assert_told(&rule, what, &build(Arc::clone(&comm), rule.clone()).map(drop).unwrap_err());
        let rule = Switched { second: second(false), ..rule };
        let mut opt = build(comm, rule.clone()).unwrap();
        step(&mut opt).unwrap();
        rule.second.store(odd, SeqCst);
        let before = (crate::common::params(&opt), crate::common::state(&opt));
        assert_told(&rule, what, &step(&mut opt).unwrap_err());
        assert_told(&rule, what, &opt.verify().unwrap_err());
        assert_eq!((crate::common::params(&opt), crate::common::state(&opt)), before);
        rule.second.store(false, SeqCst);
        step(&mut opt).unwrap();
        opt.verify().unwrap();
    })
    .unwrap();
}

#[test]
fn of_rules_that_see_elements() {
    elementwise().iter().for_each(|(what, rules)| differ(what, rules, true));
}

#[test]
fn of_rules_that_see_more() {
    layer_wise().iter().for_each(|(what, rules)| differ(what, rules, true));
}

/// A rule that reports no numbers is still compared by name and state.
#[test]
fn of_rules_that_tell_no_numbers() {
    let amsgrad: [Arc<dyn Rule>; 2] =
        [Arc::new(AdamW::default()), Arc::new(AdamW { amsgrad: true, ..AdamW::default() })];
    differ("state", &amsgrad, false);
    let named: [Arc<dyn Rule>; 2] = [Arc::new(AdamW::default()), Arc::new(Adam::default())];
    differ("rule", &named, false);
}
