//! Text form of a plan, which workers compare before they step together.

use crate::{LocalPlan, Merge, Select, Slots, What};
use std::fmt::{self, Write};
use twox_hash::XxHash3_64;

impl LocalPlan {
    /// Returns one `key = value` line for each setting that workers must share.
    pub fn describe(&self) -> String {
        let mut text = format!("local plan bucket_len = {}\n", self.bucket_len);
        for (i, f) in self.fragments.iter().enumerate() {
            let t = &f.timing;
            let mut line = |key: &str, value: &dyn fmt::Display| {
                let _ = writeln!(text, "{key} of fragment {i} = {value}");
            };
            line("params", &f.params);
            line("what", &f.what);
            line("period", &t.period.map_or("never".into(), |period| period.to_string()));
            line("offset", &t.offset);
            line("delay", &t.delay);
            line("placement", &format!("{:?}", t.placement));
            line("during", &format!("{:?}", t.during));
            line("merge", &f.merge);
            line("taken", &f.taken);
            line("weights", &format!("{:?}", f.weights));
            line("wire", &f.wire.map_or("own".into(), |wire| wire.to_string()));
            line("on_failure", &format!("{:?}", f.on_failure));
        }
        text
    }

    /// Returns a digest of [`describe`](Self::describe), equal for equal plans on any machine.
    pub fn hash(&self) -> u64 {
        XxHash3_64::oneshot(self.describe().as_bytes())
    }
}

impl fmt::Display for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Select::All => f.write_str("all"),
            Select::Names(names) => write!(f, "{names:?}"),
            Select::Part { index, of } => write!(f, "part {index} of {of}"),
            Select::Elements { name, range } => write!(f, "{range:?} of {name:?}"),
        }
    }
}

impl fmt::Display for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Slots::First => f.write_str("first moments"),
            Slots::Second => f.write_str("second moments"),
            Slots::Named(name) => write!(f, "{name:?}"),
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Params => f.write_str("params"),
            What::State(slots) => slots.fmt(f),
            What::OuterMomentum(of) => write!(f, "outer momentum of fragment {of}"),
        }
    }
}

impl fmt::Display for Merge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Merge::Mean => f.write_str("mean"),
            Merge::Outer(outer) => {
                write!(f, "{} at {}", outer.rule.name(), outer.lr)?;
                outer
                    .rule
                    .hyperparameters()
                    .iter()
                    .try_for_each(|(name, value)| write!(f, ", {name} {value}"))
            }
            Merge::Reset => f.write_str("reset"),
            Merge::Keep => f.write_str("keep"),
        }
    }
}
