//! Names of a trace's tensors: parsing and formatting.

use std::fmt;

use super::reason::Reason;

/// Meaning of a tensor in a trace. Steps count from 1, ranks from 0.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Key {
    Param { name: String },
    Grad { t: u64, rank: Option<usize>, name: String },
    Weight { t: u64 },
    Expect { t: u64, name: String },
    Eval { t: u64, name: String },
    State { t: u64, name: String, slot: String },
    Norm { t: u64 },
    Loss { t: u64 },
    Evals { t: u64 },
    Data { key: String },
}

impl Key {
    /// Parses a key from `text`, given the parameters' names, which may contain slashes.
    pub(super) fn parse(text: &str, is_param: impl Fn(&str) -> bool) -> Result<Key, Reason> {
        let stray = |why: &str| Reason::StrayTensor { name: text.to_owned(), why: why.to_owned() };
        let (kind, rest) = text.split_once('/').ok_or_else(|| stray("it has no `/`"))?;
        match kind {
            "param" => return Ok(Key::Param { name: rest.to_owned() }),
            "data" => return Ok(Key::Data { key: rest.to_owned() }),
            _ => {}
        }
        let (step, tail) = rest.split_once('/').map_or((rest, None), |(step, tail)| (step, Some(tail)));
        let t = step.parse().map_err(|_| stray("its second part is not a step"))?;
        let no_param = || stray("no such parameter");
        let named = |name: &str| is_param(name).then(|| name.to_owned()).ok_or_else(no_param);
        match (kind, tail) {
            ("weight", None) => Ok(Key::Weight { t }),
            ("expect_norm", None) => Ok(Key::Norm { t }),
            ("expect_loss", None) => Ok(Key::Loss { t }),
            ("expect_evals", None) => Ok(Key::Evals { t }),
            ("expect", Some(name)) => Ok(Key::Expect { t, name: named(name)? }),
            ("expect_eval", Some(name)) => Ok(Key::Eval { t, name: named(name)? }),
            ("expect_state", Some(tail)) => {
                let (name, slot) = tail.rsplit_once('/').ok_or_else(|| stray("it has no name of a state"))?;
                Ok(Key::State { t, name: named(name)?, slot: slot.to_owned() })
            }
            ("grad", Some(name)) if is_param(name) => Ok(Key::Grad { t, rank: None, name: name.to_owned() }),
            ("grad", Some(tail)) => {
                let (rank, name) = tail.split_once('/').ok_or_else(no_param)?;
                let rank =
                    rank.parse().map_err(|_| stray("no such parameter, and its third part is not a rank"))?;
                Ok(Key::Grad { t, rank: Some(rank), name: named(name)? })
            }
            _ => Err(stray("unknown kind of tensor")),
        }
    }

    /// Returns the key's step, if it has one.
    pub(super) fn t(&self) -> Option<u64> {
        match *self {
            Key::Param { .. } | Key::Data { .. } => None,
            Key::Grad { t, .. }
            | Key::Weight { t }
            | Key::Expect { t, .. }
            | Key::Eval { t, .. }
            | Key::State { t, .. }
            | Key::Norm { t }
            | Key::Loss { t }
            | Key::Evals { t } => Some(t),
        }
    }

    /// Returns true if the tensor is an expected result.
    pub(super) fn is_expected(&self) -> bool {
        match self {
            Key::Param { .. } | Key::Grad { .. } | Key::Weight { .. } | Key::Data { .. } => false,
            Key::Expect { .. }
            | Key::Eval { .. }
            | Key::State { .. }
            | Key::Norm { .. }
            | Key::Loss { .. }
            | Key::Evals { .. } => true,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Param { name } => write!(f, "param/{name}"),
            Key::Grad { t, rank: None, name } => write!(f, "grad/{t}/{name}"),
            Key::Grad { t, rank: Some(rank), name } => write!(f, "grad/{t}/{rank}/{name}"),
            Key::Weight { t } => write!(f, "weight/{t}"),
            Key::Expect { t, name } => write!(f, "expect/{t}/{name}"),
            Key::Eval { t, name } => write!(f, "expect_eval/{t}/{name}"),
            Key::State { t, name, slot } => write!(f, "expect_state/{t}/{name}/{slot}"),
            Key::Norm { t } => write!(f, "expect_norm/{t}"),
            Key::Loss { t } => write!(f, "expect_loss/{t}"),
            Key::Evals { t } => write!(f, "expect_evals/{t}"),
            Key::Data { key } => write!(f, "data/{key}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Key, Reason> {
        Key::parse(text, |name| ["w", "block/0/w"].contains(&name))
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for text in [
            "param/w",
            "grad/3/w",
            "grad/3/1/w",
            "grad/3/block/0/w",
            "grad/3/12/block/0/w",
            "weight/1",
            "expect/7/w",
            "expect_eval/7/block/0/w",
            "expect_state/7/block/0/w/square_avg",
            "expect_norm/2",
            "expect_loss/2",
            "expect_evals/2",
            "data/A",
        ] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        assert_eq!(parse("grad/3/1/w").unwrap(), Key::Grad { t: 3, rank: Some(1), name: "w".to_owned() });
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "w",
            "grad/w",
            "grad/x/w",
            "grad/-1/w",
            "grad/1",
            "grad/1/v",
            "grad/1/a/w",
            "expect/1/v",
            "expect_eval/1/v",
            "expect_state/1/w",
            "weight/1/w",
            "moment/1/w",
            "grad/99999999999999999999/w",
        ] {
            assert!(matches!(parse(text), Err(Reason::StrayTensor { .. })), "{text}");
        }
    }
}
