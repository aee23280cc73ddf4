//! Maps the spec of a trace to the rule that replays it: one line for every rule, with PyTorch's fields and defaults.

use meshstep_optim::{
    Adagrad, Adam, AdamW, Adjust, Adopt, Blocks, Decay, History, Lamb, Lars, Lbfgs, LineSearch, Lion,
    Moments, Momentum, Muon, QhAdamW, QhAdopt, RmsProp, Rule, ScheduleFreeAdamW, Sees, Sgd,
};
use meshstep_shard::Groups;
use serde::Deserialize;
use serde_json::Map;

use super::fields::Fields;
use super::reason::Reason;
use super::spec::{Group, Spec};

/// Kind of replay.
#[derive(Clone, Debug)]
pub(super) enum Recipe {
    /// One update per step.
    Steps { groups: Groups, lr: f64, rule: &'static str, state: &'static [&'static str], sees: Sees },
    /// Several evaluations per step.
    Lbfgs(Lbfgs),
}

/// Names that [`recipe`] knows.
const NAMES: &str = "adam, adamw, sgd, sgd_ema, rmsprop, adagrad, lion, adopt, qhadamw, qhadopt, schedulefree_adamw, lamb, \
    lars, muon, lbfgs";

/// Returns the recipe that `spec` asks for.
pub(super) fn recipe(spec: &Spec) -> Result<Recipe, Reason> {
    let name = spec.optimizer.get("name").and_then(|name| name.as_str()).unwrap_or_default();
    match name {
        "adam" => steps(spec, 1e-3, adam),
        "adamw" => steps(spec, 1e-3, adamw),
        "sgd" => steps(spec, 1e-3, sgd),
        "sgd_ema" => steps(spec, 1e-3, sgd_ema),
        "rmsprop" => steps(spec, 1e-2, rmsprop),
        "adagrad" => steps(spec, 1e-2, adagrad),
        "lion" => steps(spec, 1e-4, lion),
        "adopt" => steps(spec, 1e-3, adopt),
        "qhadamw" => steps(spec, 1e-3, qhadamw),
        "qhadopt" => steps(spec, 1e-3, qhadopt),
        "schedulefree_adamw" => {
            check_falling(spec)?;
            steps(spec, 2.5e-3, schedulefree_adamw)
        }
        "lamb" => steps(spec, 1e-3, lamb),
        "lars" => steps(spec, 1e-3, lars),
        "muon" => steps(spec, 1e-3, muon),
        "lbfgs" => lbfgs(spec),
        _ => Err(Reason::UnknownRule { name: name.to_owned(), known: NAMES.to_owned() }),
    }
}

/// Reads a rule and its groups with `read`; the learning rate is `lr` by default.
fn steps<R: Rule + 'static>(
    spec: &Spec,
    lr: f64,
    read: fn(&mut Fields) -> Result<R, Reason>,
) -> Result<Recipe, Reason> {
    let one = |group: &Group| {
        let mut fields = Fields::new(&spec.optimizer, &group.overrides)?;
        let (lr, rule) = (fields.get("lr", lr)?, read(&mut fields)?);
        fields.finish()?;
        rule.check()?;
        Ok::<_, Reason>((lr, rule))
    };
    let (lr, rule) = one(&Group { params: Vec::new(), overrides: Map::new() })?;
    let (name, state, sees) = (rule.name(), rule.state(), rule.sees());
    let mut groups = Groups::new(rule);
    for group in spec.groups.iter().flatten() {
        let (own, rule) = one(group)?;
        groups = groups.with_lr(rule, scale(own, lr)?, &group.params);
    }
    Ok(Recipe::Steps { groups, lr, rule: name, state, sees })
}

/// Refuses rates by which the recorded program weighs its average and schedule-free AdamW here does not: any but a constant, which may
/// fall after the warm-up.
fn check_falling(spec: &Spec) -> Result<(), Reason> {
    let of =
        |fields: &Map<String, serde_json::Value>, name| fields.get(name).and_then(|value| value.as_f64());
    let overrides = spec.groups.iter().flatten().map(|group| &group.overrides);
    let warm = overrides.chain([&spec.optimizer]).filter_map(|fields| of(fields, "warmup_steps"));
    let warm = warm.fold(1.0, f64::max);
    let rates = spec.lrs.as_deref().unwrap_or_default();
    let first = rates.first().copied().unwrap_or_default();
    let good = rates.iter().enumerate().all(
        |(i, &rate)| {
            if (i as f64) < warm { rate == first } else { rate <= first }
        },
    );
    match good {
        true => Ok(()),
        false => Err(Reason::Contradiction {
            what: "rates that rise, or fall during the warm-up".to_owned(),
            other: "schedulefree_adamw".to_owned(),
            why: "its average weighs updates by warmup_steps and r alone".to_owned(),
        }),
    }
}

/// Returns a group's learning rate as a multiple of the optimizer's.
fn scale(own: f64, lr: f64) -> Result<f64, Reason> {
    match own / lr {
        _ if own == lr => Ok(1.0),
        scale if scale.is_finite() => Ok(scale),
        _ => Err(Reason::Contradiction {
            what: format!("a group's lr of {own}"),
            other: format!("the optimizer's lr of {lr}"),
            why: "a group's rate is stored as a multiple of the optimizer's".to_owned(),
        }),
    }
}

/// Reads the kind of weight decay: `decay`, and `lr_max` if it is fully decoupled.
fn decay(f: &mut Fields, default: Decay) -> Result<Decay, Reason> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        Coupled,
        Decoupled,
        FullyDecoupled,
    }
    let (kind, lr_max) = (f.find("decay")?, f.find("lr_max")?);
    match (kind, lr_max) {
        (None, None) => Ok(default),
        (Some(Kind::Coupled), None) => Ok(Decay::Coupled),
        (Some(Kind::Decoupled), None) => Ok(Decay::Decoupled),
        (Some(Kind::FullyDecoupled), Some(lr_max)) => Ok(Decay::FullyDecoupled { lr_max }),
        (Some(Kind::FullyDecoupled), None) => {
            let why = "fully decoupled decay is relative to the largest learning rate";
            Err(Reason::MissingField { rule: f.rule().to_owned(), field: "lr_max", why })
        }
        (_, Some(lr_max)) => Err(Reason::Contradiction {
            what: format!("lr_max {lr_max}"),
            other: "a decay that is not fully_decoupled".to_owned(),
            why: "only fully_decoupled is relative to lr_max".to_owned(),
        }),
    }
}

/// Reads the slow moments of a quasi-hyperbolic rule: `beta1` and `nu`, or `moments`.
fn moments(f: &mut Fields, default: Moments) -> Result<Moments, Reason> {
    let (beta, weight) = default.pairs()[0];
    let (beta1, nu) = (f.find("beta1")?, f.find("nu")?);
    match f.find::<Vec<(f64, f64)>>("moments")? {
        None => Ok(Moments::one(beta1.unwrap_or(beta), nu.unwrap_or(weight))),
        Some(pairs) if beta1.is_none() && nu.is_none() => Ok(Moments::new(&pairs)?),
        Some(_) => Err(Reason::Contradiction {
            what: "moments".to_owned(),
            other: "beta1 or nu".to_owned(),
            why: "both specify the moments".to_owned(),
        }),
    }
}

/// Defines the reader of a rule with numbers and flags as fields and the rule's own defaults. The list includes
/// `weight_decay` and `maximize`, and `decay` as an extra field, which every elementwise rule has.
macro_rules! rule {
    ($name:ident, $rule:ident { $($field:ident),* } $($with:ident = $more:expr),*) => {
        fn $name(f: &mut Fields) -> Result<$rule, Reason> {
            let default = $rule::default();
            Ok($rule {
                $($field: f.get(stringify!($field), default.$field)?,)*
                $($with: $more(f, default.$with)?,)*
            })
        }
    };
}

rule!(adam, Adam { beta1, beta2, eps, amsgrad, weight_decay, maximize } decay = decay);
rule!(adamw, AdamW { beta1, beta2, eps, amsgrad, weight_decay, maximize } decay = decay);
rule!(rmsprop, RmsProp { alpha, eps, momentum, centered, weight_decay, maximize } decay = decay);
rule!(adagrad, Adagrad { lr_decay, initial_accumulator_value, eps, weight_decay, maximize } decay = decay);
rule!(lion, Lion { beta1, beta2, weight_decay, maximize } decay = decay);
rule!(adopt, Adopt { beta1, beta2, eps, weight_decay, maximize } decay = decay);
rule!(qhadamw, QhAdamW { beta2, eps, weight_decay, maximize } moments = moments, decay = decay);
rule!(qhadopt, QhAdopt { beta2, eps, weight_decay, maximize } moments = moments, decay = decay);
rule!(
    schedulefree_adamw,
    ScheduleFreeAdamW { beta1, beta2, eps, warmup_steps, r, weight_lr_power, weight_decay, maximize }
);
rule!(lamb, Lamb { beta1, beta2, eps, weight_decay, maximize });
rule!(lars, Lars { momentum, weight_decay, trust_coefficient, maximize });
rule!(sgd, Sgd { momentum, dampening, nesterov, weight_decay, maximize } form = form, decay = decay);

/// Reads `lr_inside`: the learning rate is inside the momentum buffer, as in Keras.
fn form(f: &mut Fields, default: Momentum) -> Result<Momentum, Reason> {
    Ok(if f.get("lr_inside", false)? { Momentum::LrInside } else { default })
}

fn sgd_ema(f: &mut Fields) -> Result<Sgd, Reason> {
    let default = Sgd::default();
    Ok(Sgd {
        momentum: f.get("beta", 0.9)?,
        form: Momentum::Average { debias: f.get("debias", false)? },
        weight_decay: f.get("weight_decay", default.weight_decay)?,
        maximize: f.get("maximize", default.maximize)?,
        decay: decay(f, default.decay)?,
        ..default
    })
}

/// Reads Muon: its fields, with the defaults of the published program that `variant` names.
fn muon(f: &mut Fields) -> Result<Muon, Reason> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Variant {
        Torch,
        KellerJordan,
        Moonshot,
    }
    let default = match f.find("variant")? {
        None | Some(Variant::Torch) => Muon::default(),
        Some(Variant::KellerJordan) => Muon::keller_jordan(),
        Some(Variant::Moonshot) => Muon::moonshot(),
    };
    Ok(Muon {
        momentum: f.get("momentum", default.momentum)?,
        nesterov: f.get("nesterov", default.nesterov)?,
        decaying_sum: f.get("decaying_sum", default.decaying_sum)?,
        weight_decay: f.get("weight_decay", default.weight_decay)?,
        ns_coefficients: f.get("ns_coefficients", default.ns_coefficients)?,
        ns_steps: f.get("ns_steps", default.ns_steps)?,
        eps: f.get("eps", default.eps)?,
        add_eps: f.get("add_eps", default.add_eps)?,
        adjust: adjust(f, default.adjust)?,
        blocks: blocks(f, default.blocks)?,
        maximize: f.get("maximize", default.maximize)?,
    })
}

/// Reads the blocks of a fused tensor: a number of groups of rows, or `batch`.
fn blocks(f: &mut Fields, default: Blocks) -> Result<Blocks, Reason> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Given {
        Rows(usize),
        Name(Name),
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Name {
        Batch,
    }
    Ok(match f.find("blocks")? {
        None => default,
        Some(Given::Rows(n)) => Blocks::Rows(n),
        Some(Given::Name(Name::Batch)) => Blocks::Batch,
    })
}

fn adjust(f: &mut Fields, default: Adjust) -> Result<Adjust, Reason> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Name {
        Original,
        MatchRmsAdamw,
    }
    Ok(match f.find("adjust_lr_fn")? {
        None => default,
        Some(Name::Original) => Adjust::Original,
        Some(Name::MatchRmsAdamw) => Adjust::MatchRmsAdamW,
    })
}

fn lbfgs(spec: &Spec) -> Result<Recipe, Reason> {
    let mut f = Fields::new(&spec.optimizer, &Map::new())?;
    let default = Lbfgs::default();
    let rule = Lbfgs {
        lr: f.get("lr", default.lr)?,
        max_iter: f.get("max_iter", default.max_iter)?,
        max_eval: f.find("max_eval")?,
        tolerance_grad: f.get("tolerance_grad", default.tolerance_grad)?,
        tolerance_change: f.get("tolerance_change", default.tolerance_change)?,
        history_len: f.get("history_len", default.history_len)?,
        line_search: line_search(&mut f)?,
        history: History::Exact,
    };
    f.finish()?;
    rule.check()?;
    Ok(Recipe::Lbfgs(rule))
}

fn line_search(f: &mut Fields) -> Result<LineSearch, Reason> {
    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Name {
        StrongWolfe,
    }
    Ok(f.find("line_search")?.map_or(LineSearch::None, |Name::StrongWolfe| LineSearch::StrongWolfe))
}
