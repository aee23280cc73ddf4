//! Rule for the crate graph: the picture in ARCHITECTURE.md, as a table of the allowed dependencies.

use super::complaint::Complaint;
use crate::workspace::{LIBRARIES, Member};

/// Each member with the members it may use, in development dependencies too. An edge without an entry is refused.
const ALLOWED: &[(&str, &[&str])] = &[
    ("meshstep-tensor", &["meshstep-cases"]),
    ("meshstep-comm", &["meshstep-tensor", "meshstep-cases"]),
    ("meshstep-membership", &["meshstep-comm", "meshstep-tensor", "meshstep-cases"]),
    ("meshstep-optim", &["meshstep-tensor", "meshstep-cases", "meshstep-simt"]),
    (
        "meshstep-shard",
        &["meshstep-comm", "meshstep-optim", "meshstep-tensor", "meshstep-cases", "meshstep-shard-cases"],
    ),
    (
        "meshstep-checkpoint",
        &[
            "meshstep-shard",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
            "meshstep-cases",
            "meshstep-checkpoint-cases",
            "meshstep-shard-cases",
        ],
    ),
    (
        "meshstep-local",
        &[
            "meshstep-checkpoint",
            "meshstep-shard",
            "meshstep-membership",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
            "meshstep-cases",
            "meshstep-shard-cases",
        ],
    ),
    (
        "meshstep-parallel3d",
        &[
            "meshstep-local",
            "meshstep-checkpoint",
            "meshstep-shard",
            "meshstep-membership",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
            "meshstep-cases",
            "meshstep-shard-cases",
        ],
    ),
    (
        "meshstep-candle",
        &[
            "meshstep-parallel3d",
            "meshstep-checkpoint",
            "meshstep-shard",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
            "meshstep-cases",
        ],
    ),
    (
        "meshstep",
        &[
            "meshstep-parallel3d",
            "meshstep-checkpoint",
            "meshstep-shard",
            "meshstep-membership",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
            "meshstep-cases",
        ],
    ),
    (
        "meshstep-burn",
        &[
            "meshstep-checkpoint",
            "meshstep-shard",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
            "meshstep-cases",
        ],
    ),
    (
        "meshstep-book",
        &[
            "meshstep-burn",
            "meshstep-candle",
            "meshstep-parallel3d",
            "meshstep-local",
            "meshstep-checkpoint",
            "meshstep-shard",
            "meshstep-membership",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
        ],
    ),
    (
        "meshstep-bench",
        &[
            "meshstep-candle",
            "meshstep-parallel3d",
            "meshstep-local",
            "meshstep-checkpoint",
            "meshstep-shard",
            "meshstep-membership",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
            "meshstep-bench-cases",
            "meshstep-cases",
        ],
    ),
    (
        "meshstep-bench-cases",
        &[
            "meshstep-parallel3d",
            "meshstep-local",
            "meshstep-shard",
            "meshstep-comm",
            "meshstep-optim",
            "meshstep-tensor",
        ],
    ),
    ("xtask", &[]),
    // Helpers of tests. They are not published, so a library may use them in its tests only.
    ("meshstep-cases", &[]),
    (
        "meshstep-shard-cases",
        &["meshstep-shard", "meshstep-comm", "meshstep-optim", "meshstep-tensor", "meshstep-cases"],
    ),
    (
        "meshstep-checkpoint-cases",
        &["meshstep-checkpoint", "meshstep-shard", "meshstep-comm", "meshstep-optim", "meshstep-tensor"],
    ),
    ("meshstep-simt", &[]),
    ("meshstep-gpu-runner", &[]),
];

/// Dependencies that a library leaves to programs: a framework, untyped errors, a command line.
const NOT_IN_LIBRARIES: &[&str] = &["anyhow", "burn", "candle", "clap"];

/// The framework of an adapter: the only library that may know it.
const ADAPTERS: &[(&str, &str)] = &[("meshstep-burn", "burn"), ("meshstep-candle", "candle")];

/// Complaints about the dependencies of the workspace's members.
pub(super) fn check(members: &[Member]) -> Vec<Complaint> {
    let missing = ALLOWED.iter().filter(|(name, _)| members.iter().all(|member| member.name != *name));
    let stale = missing.map(|(name, _)| {
        Complaint::file("Cargo.toml", format!("{name} is no member, but a row in {}; remove it", file!()))
    });
    stale.chain(members.iter().flat_map(|member| check_member(member, members))).collect()
}

fn check_member(member: &Member, members: &[Member]) -> Vec<Complaint> {
    let complain = |what| Complaint::file(&member.name, what);
    let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == member.name) else {
        return vec![complain(format!("has no row in {}; add one that says what it may use", file!()))];
    };
    let inside = member
        .dependencies
        .iter()
        // Tests of a member may use it with more features.
        .filter(|used| **used != member.name && members.iter().any(|other| other.name == **used))
        .filter(|used| !allowed.contains(&used.as_str()))
        .map(|used| complain(format!("depends on {used}, but may use only {allowed:?} of this workspace")));
    let outside = member
        .dependencies
        .iter()
        .filter(|used| LIBRARIES.contains(&member.name.as_str()) && left_to_programs(used))
        .filter(|used| !adapts(member, used))
        .map(|used| complain(format!("depends on {used}, which is for bench and xtask only")));
    inside.chain(outside).collect()
}

fn adapts(member: &Member, used: &str) -> bool {
    ADAPTERS.iter().any(|(library, family)| *library == member.name && is_of(family, used))
}

fn left_to_programs(name: &str) -> bool {
    NOT_IN_LIBRARIES.iter().any(|banned| is_of(banned, name))
}

/// `candle` stands for its whole family, `candle-core` and the rest.
fn is_of(family: &str, name: &str) -> bool {
    name.strip_prefix(family).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every member of the table, `name` with these dependencies.
    fn with(name: &str, dependencies: &[&str]) -> Vec<Member> {
        let member = |(member, _): &(&str, _)| Member {
            name: (*member).to_owned(),
            folder: (*member).to_owned(),
            dependencies: match *member == name {
                true => dependencies.iter().map(|used| (*used).to_owned()).collect(),
                false => Vec::new(),
            },
        };
        ALLOWED.iter().map(member).collect()
    }

    #[test]
    fn every_edge_is_allowed_exactly_if_the_table_has_it() {
        for (name, allowed) in ALLOWED {
            for (used, _) in ALLOWED.iter().filter(|(used, _)| used != name) {
                let complaints = check(&with(name, &[used]));
                assert_eq!(complaints.is_empty(), allowed.contains(used), "{name} -> {used}: {complaints:?}");
            }
        }
    }

    #[test]
    fn nobody_may_use_bench_or_xtask() {
        for (_, allowed) in ALLOWED {
            assert!(!allowed.contains(&"meshstep-bench") && !allowed.contains(&"xtask"));
        }
    }

    #[test]
    fn libraries_stay_free_of_programs_crates() {
        for banned in ["anyhow", "clap", "candle-core", "candle-nn"] {
            let complaints = check(&with("meshstep-shard", &[banned]));
            assert_eq!(complaints.len(), 1, "{banned}: {complaints:?}");
            assert_eq!(check(&with("meshstep-bench", &[banned])), []);
        }
        assert_eq!(check(&with("meshstep-shard", &["candles", "rayon"])), []);
    }

    #[test]
    fn a_framework_is_known_to_its_adapter_alone() {
        assert_eq!(check(&with("meshstep-candle", &["candle-core", "candle-nn"])), []);
        assert_eq!(check(&with("meshstep-burn", &["burn-core", "burn-nn"])), []);
        assert_eq!(check(&with("meshstep-burn", &["candle-core"])).len(), 1);
        assert_eq!(check(&with("meshstep-candle", &["anyhow"])).len(), 1);
        for library in ["meshstep-parallel3d", "meshstep-shard"] {
            assert_eq!(check(&with(library, &["candle-core"])).len(), 1, "{library}");
        }
    }

    #[test]
    fn members_and_table_must_match() {
        let mut members = with("meshstep-tensor", &[]);
        let dropped = members.remove(0);
        assert!(check(&members)[0].what.contains("meshstep-tensor is no member"));
        members.push(dropped);
        let name = "meshstep-new".to_owned();
        members.push(Member { folder: name.clone(), name, dependencies: Vec::new() });
        assert!(check(&members)[0].what.contains("has no row"));
    }

    #[test]
    fn every_library_has_a_row() {
        for library in LIBRARIES {
            assert!(ALLOWED.iter().any(|(name, _)| *name == library), "{library}");
        }
    }
}
