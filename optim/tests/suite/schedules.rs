//! Learning rates against recorded ones of transformers and PyTorch, refused parameters, and the ends of phases.

use meshstep_optim::Error;
use meshstep_optim::schedule::*;
use std::collections::HashMap;
use std::str::FromStr;

/// Written by `bench/python/record_schedules.py`, which describes the lines.
const RECORDED: &str = include_str!("data/schedules.txt");

/// One recorded case.
struct Case<'a> {
    kind: &'a str,
    name: &'a str,
    settings: HashMap<&'a str, &'a str>,
    rates: Vec<f64>,
}

impl<'a> Case<'a> {
    fn read(line: &'a str) -> Self {
        let (head, rates) = line.split_once(" = ").unwrap();
        let mut words = head.split(' ');
        let (kind, name) = (words.next().unwrap(), words.next().unwrap());
        let settings = words.map(|word| word.split_once('=').unwrap()).collect();
        Case { kind, name, settings, rates: rates.split(' ').map(|rate| rate.parse().unwrap()).collect() }
    }

    fn maybe<T: FromStr>(&self, key: &str) -> Option<T> {
        self.settings.get(key).map(|value| value.parse().ok().unwrap())
    }

    fn get<T: FromStr>(&self, key: &str) -> T {
        self.maybe(key).unwrap_or_else(|| panic!("{} has no {key}", self.name))
    }

    fn schedule(&self) -> Schedule {
        let schedule = self.curve(self.get("lr")).unwrap();
        match self.maybe("warmup") {
            Some(steps) => schedule.after_warmup(steps, self.get("start_factor")).unwrap(),
            None => schedule,
        }
    }

    fn min_lr(&self) -> MinLr {
        self.maybe("min_lr").map_or_else(|| MinLr::Rate(self.get("min_lr_rate")), MinLr::Lr)
    }

    fn curve(&self, lr: f64) -> Result<Schedule, Error> {
        let (warmup, training) = (self.maybe("num_warmup_steps"), self.maybe("num_training_steps"));
        let (warmup, training) = (warmup.unwrap_or(0), training.unwrap_or(0));
        let cycles = || self.maybe("num_cycles").unwrap_or(0.5);
        match self.name {
            "constant" => Schedule::new(lr, Constant),
            "constant_with_warmup" => Schedule::new(lr, ConstantWithWarmup { num_warmup_steps: warmup }),
            "linear" => Schedule::new(lr, Linear { num_warmup_steps: warmup, num_training_steps: training }),
            "cosine" => Schedule::new(lr, Cosine { num_cycles: cycles(), ..Cosine::new(warmup, training) }),
            "cosine_with_restarts" => {
                let usual = CosineWithRestarts::new(warmup, training);
                Schedule::new(lr, CosineWithRestarts { num_cycles: self.get("num_cycles"), ..usual })
            }
            "cosine_with_min_lr" => {
                let usual = CosineWithMinLr::new(warmup, training, self.min_lr());
                Schedule::new(lr, CosineWithMinLr { num_cycles: cycles(), ..usual })
            }
            "cosine_warmup_with_min_lr" => {
                let usual = CosineWarmupWithMinLr::new(warmup, training, self.min_lr());
                let (num_cycles, warmup_lr_rate) = (cycles(), self.maybe("warmup_lr_rate"));
                Schedule::new(lr, CosineWarmupWithMinLr { num_cycles, warmup_lr_rate, ..usual })
            }
            "polynomial" => {
                let (lr_end, power) = (self.get("lr_end"), self.get("power"));
                Schedule::new(lr, Polynomial { lr_end, power, ..Polynomial::new(warmup, training) })
            }
            "inverse_sqrt" => {
                let timescale = self.maybe("timescale");
                Schedule::new(lr, InverseSqrt { num_warmup_steps: warmup, timescale })
            }
            "warmup_stable_decay" => Schedule::new(lr, self.warmup_stable_decay()),
            _ => self.torch(lr),
        }
    }

    fn warmup_stable_decay(&self) -> WarmupStableDecay {
        let ramp = |key| match self.settings.get(key).copied() {
            Some("linear") => Some(Ramp::Linear),
            Some("cosine") => Some(Ramp::Cosine),
            Some("1-sqrt") => Some(Ramp::OneMinusSqrt),
            _ => None,
        };
        let count = |key| self.get(key);
        let [up, flat, down] = ["num_warmup_steps", "num_stable_steps", "num_decay_steps"].map(count);
        let usual = WarmupStableDecay::new(up, flat, down);
        WarmupStableDecay {
            warmup_type: ramp("warmup_type").unwrap_or(usual.warmup_type),
            decay_type: ramp("decay_type").unwrap_or(usual.decay_type),
            min_lr_ratio: self.maybe("min_lr_ratio").unwrap_or(usual.min_lr_ratio),
            num_cycles: self.get("num_cycles"),
            ..usual
        }
    }

    fn torch(&self, lr: f64) -> Result<Schedule, Error> {
        let gamma = || self.get("gamma");
        let eta_min = || self.get("eta_min");
        match self.name {
            "StepLR" => Schedule::new(lr, StepLR { step_size: self.get("step_size"), gamma: gamma() }),
            "MultiStepLR" => {
                let milestones = self.settings["milestones"].split(',').map(|m| m.parse().unwrap()).collect();
                Schedule::new(lr, MultiStepLR { milestones, gamma: gamma() })
            }
            "ExponentialLR" => Schedule::new(lr, ExponentialLR { gamma: gamma() }),
            "ConstantLR" => Schedule::new(
                lr,
                ConstantLR { factor: self.get("factor"), total_iters: self.get("total_iters") },
            ),
            "LinearLR" => {
                let (start_factor, end_factor) = (self.get("start_factor"), self.get("end_factor"));
                Schedule::new(lr, LinearLR { start_factor, end_factor, total_iters: self.get("total_iters") })
            }
            "PolynomialLR" => Schedule::new(
                lr,
                PolynomialLR { total_iters: self.get("total_iters"), power: self.get("power") },
            ),
            "CosineAnnealingLR" => {
                Schedule::new(lr, CosineAnnealingLR { t_max: self.get("T_max"), eta_min: eta_min() })
            }
            "CosineAnnealingWarmRestarts" => {
                let (t_0, t_mult) = (self.get("T_0"), self.get("T_mult"));
                Schedule::new(lr, CosineAnnealingWarmRestarts { t_0, t_mult, eta_min: eta_min() })
            }
            "OneCycleLR" => Schedule::new(lr, self.one_cycle()),
            other => panic!("{other} is not known"),
        }
    }

    fn one_cycle(&self) -> OneCycleLR {
        let usual = OneCycleLR::new(self.get("total_steps"));
        let linear = self.settings.get("anneal_strategy") == Some(&"linear");
        OneCycleLR {
            pct_start: self.maybe("pct_start").unwrap_or(usual.pct_start),
            anneal_strategy: if linear { Anneal::Linear } else { usual.anneal_strategy },
            div_factor: self.maybe("div_factor").unwrap_or(usual.div_factor),
            final_div_factor: self.maybe("final_div_factor").unwrap_or(usual.final_div_factor),
            three_phase: self.settings.get("three_phase") == Some(&"True"),
            ..usual
        }
    }
}

#[test]
fn recorded_learning_rates_are_met() {
    let mut worst: HashMap<&str, (f64, &str)> = HashMap::new();
    let mut names = std::collections::BTreeSet::new();
    for line in RECORDED.lines().filter(|line| !line.starts_with('#')) {
        let case = Case::read(line);
        let (schedule, every) = (case.schedule(), case.get::<u64>("every"));
        let tolerance = if case.kind == "steps" { 1e-12 } else { 1e-15 };
        assert!(case.rates.len() >= 20, "{line}");
        for (i, &rate) in case.rates.iter().enumerate() {
            let ours = schedule.at(i as u64 * every);
            let off = (ours - rate).abs() / schedule.lr();
            assert!(off <= tolerance, "step {}: {ours:e}, recorded {rate:e}: {line}", i as u64 * every);
            let worst = worst.entry(case.kind).or_default();
            *worst = if off > worst.0 { (off, case.name) } else { *worst };
        }
        names.insert(case.name);
    }
    println!("largest differences, in parts of the base rate: {worst:?}");
    assert_eq!(names.len(), 19, "{names:?}");
}

#[test]
fn what_the_sources_refuse_is_refused() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    fn refused(lr: f64, curve: impl Curve + 'static, says: &str) {
        let error = Schedule::new(lr, curve).unwrap_err().to_string();
        assert!(error.contains(says), "{error:?} should say {says:?}");
    }
    for lr in [-0.1, nan, inf] {
        refused(lr, Constant, "constant: lr = ");
    }
    let polynomial = Polynomial::new(5, 20);
    refused(1e-7, polynomial, "polynomial: lr_end = 0.0000001 is out of range; use a number >= 0 below lr");
    refused(0.1, Polynomial { lr_end: 0.2, ..polynomial }, "lr_end = 0.2");
    refused(0.1, Polynomial { lr_end: -0.2, ..polynomial }, "lr_end = -0.2");
    refused(0.1, Polynomial { power: -1.0, ..polynomial }, "power = -1");
    refused(0.1, Polynomial::new(20, 20), "num_training_steps = 20 is out of range; use more than");
    refused(0.1, Cosine { num_cycles: nan, ..Cosine::new(1, 2) }, "cosine: num_cycles");
    refused(0.1, CosineWithRestarts { num_cycles: 0, ..CosineWithRestarts::new(1, 2) }, "num_cycles = 0");
    refused(0.1, CosineWithMinLr::new(1, 2, MinLr::Lr(0.2)), "min_lr = 0.2");
    refused(0.0, CosineWithMinLr::new(1, 2, MinLr::Lr(0.0)), "an lr above 0");
    refused(0.1, CosineWithMinLr::new(1, 2, MinLr::Rate(1.1)), "min_lr_rate = 1.1");
    refused(0.1, CosineWarmupWithMinLr::new(1, 2, MinLr::Rate(nan)), "min_lr_rate = NaN");
    let ahead = CosineWarmupWithMinLr::new(1, 2, MinLr::Rate(0.0));
    refused(0.1, CosineWarmupWithMinLr { warmup_lr_rate: Some(-1.0), ..ahead }, "warmup_lr_rate = -1");
    refused(0.1, InverseSqrt { num_warmup_steps: 0, timescale: Some(0) }, "timescale = 0");
    let wsd = WarmupStableDecay::new(1, 2, 3);
    refused(0.1, WarmupStableDecay { min_lr_ratio: -0.5, ..wsd }, "min_lr_ratio = -0.5");
    refused(0.1, WarmupStableDecay { num_cycles: inf, ..wsd }, "num_cycles = inf");
    refused(0.1, StepLR { step_size: 0, gamma: 0.1 }, "StepLR: step_size = 0 is out of range; use 1 or more");
    refused(0.1, MultiStepLR { milestones: vec![1], gamma: nan }, "gamma = NaN");
    refused(0.1, ExponentialLR { gamma: -0.9 }, "gamma = -0.9");
    refused(0.1, ConstantLR { factor: 1.5, total_iters: 1 }, "factor = 1.5");
    let linear = LinearLR { start_factor: 0.5, end_factor: 1.0, total_iters: 5 };
    refused(0.1, LinearLR { start_factor: 0.0, ..linear }, "start_factor = 0");
    refused(0.1, LinearLR { start_factor: 1.5, ..linear }, "start_factor = 1.5");
    refused(0.1, LinearLR { end_factor: -0.1, ..linear }, "end_factor = -0.1");
    refused(0.1, LinearLR { total_iters: 0, ..linear }, "total_iters = 0");
    refused(0.1, PolynomialLR { total_iters: 0, power: 1.0 }, "total_iters = 0");
    refused(0.1, CosineAnnealingLR { t_max: 0, eta_min: 0.0 }, "t_max = 0");
    refused(0.1, CosineAnnealingWarmRestarts { t_0: 0, t_mult: 1, eta_min: 0.0 }, "t_0 = 0");
    refused(0.1, CosineAnnealingWarmRestarts { t_0: 1, t_mult: 0, eta_min: 0.0 }, "t_mult = 0");
    refused(0.1, OneCycleLR::new(0), "total_steps = 0");
    let cycle = OneCycleLR::new(10);
    refused(0.1, OneCycleLR { pct_start: 1.1, ..cycle }, "pct_start = 1.1");
    refused(0.1, OneCycleLR { pct_start: -0.1, ..cycle }, "pct_start = -0.1");
    refused(0.1, OneCycleLR { div_factor: 0.0, ..cycle }, "div_factor = 0");
    refused(0.1, OneCycleLR { final_div_factor: nan, ..cycle }, "final_div_factor = NaN");
    for start_factor in [0.0, 1.1, nan] {
        let constant = Schedule::new(0.1, Constant).unwrap();
        let error = constant.after_warmup(3, start_factor).unwrap_err().to_string();
        assert!(error.contains("warm-up: start_factor = "), "{error}");
    }
}

/// Every step of every count has a finite rate, from 0 to the base rate (a one-cycle's first rate may be slightly above).
#[test]
fn no_step_is_without_a_rate() {
    let check = |schedule: Result<Schedule, Error>| {
        let schedule = schedule.unwrap();
        for step in (0..40).chain([1 << 20, 1 << 40, u64::MAX]) {
            let rate = schedule.at(step);
            assert!((0.0..=1.0 + 1e-15).contains(&rate), "step {step}: {rate}: {schedule:?}");
        }
    };
    for (warmup, training) in [(0, 0), (0, 1), (1, 1), (7, 3), (3, 30), (u64::MAX, 5)] {
        check(Schedule::new(1.0, Linear { num_warmup_steps: warmup, num_training_steps: training }));
        check(Schedule::new(1.0, Cosine::new(warmup, training)));
        check(Schedule::new(1.0, CosineWithRestarts::new(warmup, training)));
        check(Schedule::new(1.0, CosineWarmupWithMinLr::new(warmup, training, MinLr::Rate(0.1))));
        check(Schedule::new(1.0, InverseSqrt { num_warmup_steps: warmup, timescale: None }));
        check(Schedule::new(1.0, WarmupStableDecay::new(warmup, training, training)));
        check(Schedule::new(1.0, Constant).unwrap().after_warmup(warmup, 0.5));
    }
    for total in 1..30 {
        for pct_start in [0.0, 0.1, 0.3, 0.5, 0.77, 1.0] {
            for three_phase in [false, true] {
                check(Schedule::new(1.0, OneCycleLR { pct_start, three_phase, ..OneCycleLR::new(total) }));
            }
        }
        check(Schedule::new(1.0, CosineAnnealingWarmRestarts { t_0: total, t_mult: 3, eta_min: 0.0 }));
        check(Schedule::new(1.0, StepLR { step_size: total, gamma: 0.5 }));
    }
}

#[test]
fn one_cycle_holds_its_last_rate_and_skips_phases_without_steps() {
    let cycle = Schedule::new(1.0, OneCycleLR::new(10)).unwrap();
    assert_eq!([cycle.at(9), cycle.at(10), cycle.at(1000)], [1.0 / 25.0 / 1e4; 3]);
    // With a `pct_start` of 0.1 and 10 steps the peak is at step 0.
    let sudden = Schedule::new(1.0, OneCycleLR { pct_start: 0.1, ..OneCycleLR::new(10) }).unwrap();
    assert_eq!(sudden.at(0), 1.0);
}
