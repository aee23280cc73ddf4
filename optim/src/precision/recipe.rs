//! Valid combinations of types in one update, and their rounding. Invalid ones are refused with the reason.

use crate::{Error, Flat, NEAREST_RETENTION, Rounding, Rule};
use meshstep_tensor::DType;

/// Checks the types of `flat` for `rule`.
pub(crate) fn check_types(rule: &dyn Rule, flat: &Flat<'_, '_>, rounding: Rounding) -> Result<(), Error> {
    let params = flat.params.dtype();
    match (params, flat.grads.dtype()) {
        (DType::F32 | DType::BF16, DType::F32 | DType::BF16 | DType::F16) => {}
        (DType::F64, DType::F64) => {}
        (DType::F32, given) => return refused("grads of f32 parameters", given, "f32, bf16 or f16"),
        (DType::BF16, given) => return refused("grads of bf16 parameters", given, "f32, bf16 or f16"),
        (DType::F64, given) => return refused("grads of f64 parameters", given, "f64"),
        (given, _) => {
            return refused("params", given, "f32 or f64, or bf16 with a remainder; f16 into `copy`");
        }
    }
    check_copy(params, flat.copy.as_ref().map(|copy| copy.dtype()))?;
    let remainder = flat.remainder.as_ref().map(|remainder| remainder.dtype());
    match (params, remainder) {
        (DType::BF16, Some(DType::U16)) => {}
        (DType::BF16, None) if rounding == Rounding::Stochastic => {}
        (DType::BF16, None) => return Err(Error::NearestParams),
        (DType::BF16, Some(given)) => return refused("a remainder", given, "u16"),
        (given, Some(_)) => return refused("params with a remainder", given, "bf16, or no remainder"),
        _ => {}
    }
    flat.state.iter().try_for_each(|slot| check_state(rule, params, slot.dtype(), rounding))?;
    check_one_type(flat)
}

fn refused(what: &'static str, given: DType, works: &'static str) -> Result<(), Error> {
    Err(Error::DType { what, given, works })
}

fn check_copy(params: DType, copy: Option<DType>) -> Result<(), Error> {
    match (params, copy) {
        (_, None) | (DType::F32, Some(DType::BF16 | DType::F16)) => Ok(()),
        (DType::F32, Some(given)) => refused("a copy of f32 parameters", given, "bf16 or f16"),
        (DType::F64, Some(given)) => refused("a copy of f64 parameters", given, "no copy"),
        (_, Some(given)) => refused("a copy of bf16 parameters", given, "no copy"),
    }
}

fn check_state(rule: &dyn Rule, params: DType, state: DType, rounding: Rounding) -> Result<(), Error> {
    let retention = rule.retention();
    match (params, state) {
        (DType::F64, DType::F64) | (DType::F32 | DType::BF16, DType::F32) => Ok(()),
        (DType::F32 | DType::BF16, DType::BF16) => match rounding {
            Rounding::Nearest if retention > NEAREST_RETENTION => {
                Err(Error::NearestState { rule: rule.name(), retention, works: NEAREST_RETENTION })
            }
            _ => Ok(()),
        },
        (DType::F64, given) => refused("state of f64 parameters", given, "f64"),
        (_, given) => refused("state", given, "f32 or bf16"),
    }
}

fn check_one_type(flat: &Flat<'_, '_>) -> Result<(), Error> {
    let mut types = flat.state.iter().map(|slot| slot.dtype());
    let Some(first) = types.next() else { return Ok(()) };
    let other = types.find(|&other| other != first);
    other.map_or(Ok(()), |given| refused("one state vector of several", given, "one type for all"))
}
