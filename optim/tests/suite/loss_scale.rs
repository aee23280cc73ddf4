//! Loss scales against PyTorch's recorded ones and against the table in the documentation; refused values.

use meshstep_optim::{DynamicLossScale, LossScale, LossScaleState};

/// Written by `bench/python/record_loss_scale.py`, which describes the lines.
const RECORDED: &str = include_str!("data/loss_scale.txt");
const SOURCE: &str = include_str!("../../src/loss_scale.rs");
const PATTERN: &str = "110001000001110000";

/// Returns the scale of every step of the pattern, and the one after it.
fn scales(dynamic: DynamicLossScale, pattern: &str) -> Vec<f64> {
    let rule = LossScale::Dynamic(dynamic);
    rule.check().unwrap();
    let mut state = rule.start();
    let mut scales = vec![state.scale];
    for overflow in pattern.chars() {
        rule.update(&mut state, overflow == '1');
        rule.check_state(&state).unwrap();
        scales.push(state.scale);
    }
    scales
}

#[test]
fn pytorchs_scaler_goes_the_same_way() {
    let lines = RECORDED.lines().filter(|line| !line.starts_with('#'));
    let mut cases = 0;
    for line in lines {
        let (case, expected) = line.split_once(" = ").unwrap();
        let case: Vec<&str> = case.split(' ').collect();
        let number = |i: usize| case[i].parse::<f64>().unwrap();
        let dynamic = DynamicLossScale {
            init_scale: number(0),
            growth_factor: number(1),
            backoff_factor: number(2),
            growth_interval: case[3].parse().unwrap(),
            ..DynamicLossScale::default()
        };
        let expected: Vec<f64> = expected.split(' ').map(|scale| scale.parse().unwrap()).collect();
        assert_eq!(scales(dynamic, case[4]), expected, "{line}");
        cases += 1;
    }
    assert_eq!(cases, 5);
}

#[test]
fn the_documented_table_is_what_happens() {
    let rows: Vec<Vec<&str>> = SOURCE
        .lines()
        .filter_map(|line| line.strip_prefix("//! | "))
        .filter(|line| line.starts_with(|c: char| c.is_ascii_digit()))
        .map(|line| line.trim_end_matches('|').split('|').map(str::trim).collect())
        .collect();
    let overflows: String = rows.iter().map(|row| row[1]).collect();
    assert_eq!(overflows, PATTERN);
    for (column, hysteresis) in [(2, 1), (3, 2)] {
        let dynamic = DynamicLossScale { growth_interval: 2, hysteresis, ..DynamicLossScale::default() };
        let documented: Vec<f64> = rows.iter().map(|row| row[column].parse().unwrap()).collect();
        assert_eq!(documented, scales(dynamic, PATTERN), "hysteresis {hysteresis}");
    }
}

/// Counted by hand from Megatron's rule: single overflows use up the hysteresis too, and only growth renews it.
#[test]
fn overflows_are_used_up_until_the_scale_grows() {
    let dynamic = DynamicLossScale {
        init_scale: 16.0,
        growth_interval: 3,
        hysteresis: 2,
        ..DynamicLossScale::default()
    };
    let expected = [16.0, 16.0, 16.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 4.0];
    assert_eq!(scales(dynamic, "101100011"), expected);
}

#[test]
fn the_scale_stays_within_its_bounds() {
    let dynamic = DynamicLossScale { init_scale: 4.0, min_scale: 1.5, ..DynamicLossScale::default() };
    assert_eq!(scales(dynamic, "1111"), [4.0, 2.0, 1.5, 1.5, 1.5]);
    let dynamic = DynamicLossScale { init_scale: 3e23, growth_interval: 1, ..DynamicLossScale::default() };
    assert_eq!(scales(dynamic, "0001"), [3e23, 6e23, 6e23, 6e23, 3e23]);
    let rule = LossScale::Static(128.0);
    let mut state = rule.start();
    for overflow in [true, true, false, false] {
        rule.update(&mut state, overflow);
        assert_eq!(state, rule.start());
        assert!(!rule.can_fall(&state));
    }
    let rule = LossScale::Dynamic(DynamicLossScale { min_scale: 64.0, ..DynamicLossScale::default() });
    assert!(rule.can_fall(&rule.start()));
    assert!(!rule.can_fall(&LossScaleState { scale: 64.0, ..rule.start() }));
}

#[test]
fn a_restored_state_goes_on_as_the_saved_one() {
    let rule =
        LossScale::Dynamic(DynamicLossScale { growth_interval: 3, hysteresis: 2, ..Default::default() });
    let overflow = |step: usize| PATTERN.as_bytes()[step] == b'1';
    let mut whole = rule.start();
    for step in 0..18 {
        let mut restored = whole;
        rule.check_state(&restored).unwrap();
        (step..18).for_each(|step| rule.update(&mut restored, overflow(step)));
        let mut straight = rule.start();
        (0..18).for_each(|step| rule.update(&mut straight, overflow(step)));
        assert_eq!(restored, straight);
        rule.update(&mut whole, overflow(step));
    }
    // A state from a run with a longer interval grows at once.
    let mut late = LossScaleState { scale: 2.0, growth_tracker: 1000, hysteresis_tracker: 1 };
    rule.update(&mut late, false);
    assert_eq!(late, LossScaleState { scale: 4.0, growth_tracker: 0, hysteresis_tracker: 2 });
}

#[test]
fn what_is_out_of_range_is_refused() {
    let usual = DynamicLossScale::default();
    let refused = |rule: LossScale, says: &str| {
        let error = rule.check().unwrap_err().to_string();
        assert!(error.starts_with(&format!("loss scale: {says} is out of range; use ")), "{error}");
    };
    for (scale, says) in [(0.0, "0"), (-1.0, "-1"), (f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
        refused(LossScale::Static(scale), &format!("scale = {says}"));
        let dynamic = DynamicLossScale { init_scale: scale, ..usual };
        refused(LossScale::Dynamic(dynamic), &format!("init_scale = {says}"));
        let dynamic = DynamicLossScale { min_scale: scale, ..usual };
        refused(LossScale::Dynamic(dynamic), &format!("min_scale = {says}"));
    }
    for (dynamic, says) in [
        (DynamicLossScale { min_scale: 65537.0, ..usual }, "min_scale = 65537"),
        (DynamicLossScale { growth_factor: 1.0, ..usual }, "growth_factor = 1"),
        (DynamicLossScale { growth_factor: f64::INFINITY, ..usual }, "growth_factor = inf"),
        (DynamicLossScale { backoff_factor: 1.0, ..usual }, "backoff_factor = 1"),
        (DynamicLossScale { backoff_factor: 0.0, ..usual }, "backoff_factor = 0"),
        (DynamicLossScale { growth_interval: 0, ..usual }, "growth_interval = 0"),
        (DynamicLossScale { hysteresis: 0, ..usual }, "hysteresis = 0"),
    ] {
        refused(LossScale::Dynamic(dynamic), says);
    }
    let state = LossScale::Dynamic(usual).start();
    for (rule, state, says) in [
        (LossScale::Dynamic(usual), LossScaleState { scale: f64::NAN, ..state }, "scale = NaN"),
        (LossScale::Dynamic(usual), LossScaleState { scale: 0.5, ..state }, "not below min_scale"),
        (
            LossScale::Dynamic(usual),
            LossScaleState { hysteresis_tracker: 2, ..state },
            "not above hysteresis",
        ),
        (LossScale::Static(2.0), state, "the static scale itself"),
    ] {
        let error = rule.check_state(&state).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
