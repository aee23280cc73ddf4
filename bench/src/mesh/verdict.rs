//! Checks that runs agree: stages on one mesh bit for bit, meshes up to rounding.

use std::fmt;

use super::Trained;
use crate::train::compare::{Finals, first_difference};

/// Maximum relative difference of losses and norms from the first mesh's.
const LOSSES: f64 = 1e-4;
/// Maximum difference of a parameter's elements, relative to the largest element on the first mesh.
const PARAMETERS: f64 = 1e-3;

/// Comparison of all runs, mesh by mesh.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict {
    meshes: Vec<OnMesh>,
}

#[derive(Clone, Debug, PartialEq)]
struct OnMesh {
    mesh: String,
    stages: Vec<u8>,
    /// First difference between stages.
    difference: Option<String>,
    /// Differences from the first mesh; `None` for the first mesh itself.
    apart: Option<Apart>,
}

/// Largest relative differences.
#[derive(Clone, Debug, PartialEq)]
struct Apart {
    from: String,
    losses: f64,
    norms: f64,
    /// Parameter with the largest difference, and this difference.
    parameter: (String, f64),
}

impl Verdict {
    /// Compares runs in their order; the stages of a mesh must be adjacent.
    pub(crate) fn of(runs: &[Trained]) -> Verdict {
        let meshes = runs.chunk_by(|a, b| a.mesh == b.mesh);
        let on = |stages: &[Trained]| OnMesh {
            mesh: stages[0].mesh.to_string(),
            stages: stages.iter().map(|run| run.stage).collect(),
            difference: stages.iter().find_map(|run| between_stages(&stages[0], run)),
            apart: (stages[0].mesh != runs[0].mesh).then(|| Apart::of(&runs[0], &stages[0])),
        };
        Verdict { meshes: meshes.map(on).collect() }
    }

    /// Returns true if all differences are within the limits.
    pub(crate) fn holds(&self) -> bool {
        let close = |apart: &Apart| apart.all().iter().all(|(_, far, allowed)| far <= allowed);
        self.meshes.iter().all(|mesh| mesh.difference.is_none() && mesh.apart.as_ref().is_none_or(close))
    }
}

impl Apart {
    fn of(first: &Trained, other: &Trained) -> Apart {
        let steps = |a: &[f64], b: &[f64]| largest(a.iter().zip(b).map(|(a, b)| (b - a).abs() / a.abs()));
        Apart {
            from: first.mesh.to_string(),
            losses: steps(&first.losses, &other.losses),
            norms: steps(&first.norms, &other.norms),
            parameter: furthest(&first.finals, &other.finals),
        }
    }
}

impl Apart {
    /// Returns each kind of value with its difference and its limit.
    fn all(&self) -> [(String, f64, f64); 3] {
        let (name, parameter) = &self.parameter;
        [
            ("losses".to_owned(), self.losses, LOSSES),
            ("norms".to_owned(), self.norms, LOSSES),
            (format!("parameters {name}"), *parameter, PARAMETERS),
        ]
    }
}

/// Describes the first value that is not bit-identical.
fn between_stages(first: &Trained, other: &Trained) -> Option<String> {
    let names = [first, other].map(|run| format!("stage {}", run.stage));
    let per_step = |what: &str, of: fn(&Trained) -> &[f64]| {
        let mut steps = of(first).iter().zip(of(other)).enumerate();
        let (t, (a, b)) = steps.find(|(_, (a, b))| a.to_bits() != b.to_bits())?;
        Some(format!("the {what} of step {t} is {a:e} at {} and {b:e} at {}", names[0], names[1]))
    };
    per_step("loss", |run| &run.losses)
        .or_else(|| per_step("norm", |run| &run.norms))
        .or_else(|| first_difference((&names[0], &first.finals), (&names[1], &other.finals)))
}

/// Returns the parameter with the largest difference of elements, relative to its largest element.
fn furthest(first: &Finals, other: &Finals) -> (String, f64) {
    let mut worst = (String::new(), 0.0);
    for ((name, a), (_, b)) in first.iter().zip(other) {
        let size = largest(a.iter().map(|x| f64::from(x.abs())));
        let difference = largest(a.iter().zip(b).map(|(x, y)| (f64::from(*x) - f64::from(*y)).abs()));
        let apart = difference / size;
        if apart > worst.1 || apart.is_nan() {
            worst = (name.clone(), apart);
        }
    }
    worst
}

/// Returns the largest value; NaN if any is NaN.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |largest, value| if value <= largest { largest } else { value })
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for OnMesh { mesh, stages, difference, apart } in &self.meshes {
            let stages: Vec<String> = stages.iter().map(u8::to_string).collect();
            let stages = stages.join(", ");
            match difference {
                Some(difference) => write!(f, "{mesh}: stages {stages} DIFFER: {difference}")?,
                None if stages.len() == 1 => write!(f, "{mesh}: copies on its ranks are bit-identical")?,
                None => write!(f, "{mesh}: stages {stages} and copies on its ranks are bit-identical")?,
            }
            if let Some(apart) = apart {
                write!(f, "; from {}", apart.from)?;
                for (what, far, allowed) in apart.all() {
                    let within = if far <= allowed { "within" } else { "NOT WITHIN" };
                    write!(f, ", {what} {far:.1e} ({within} {allowed:.0e})")?;
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(mesh: &str, stage: u8) -> Trained {
        Trained {
            mesh: mesh.parse().unwrap(),
            stage,
            losses: vec![5.0, 4.0],
            norms: vec![1.0, 0.5],
            ms_per_step: 1.0,
            sent: 0,
            sent_by_layers: [0, 0],
            peak: 0,
            digest: String::new(),
            finals: vec![("w".to_owned(), vec![2.0, 0.0]), ("b".to_owned(), vec![1.0])],
        }
    }

    #[test]
    fn meshes_may_round_differently_and_stages_may_not() {
        let mut other = run("tp=2", 0);
        (other.losses[1], other.norms[1]) = (4.0003, 0.50004);
        other.finals[0].1[1] = 0.0019;
        let verdict = Verdict::of(&[run("tp=1", 0), run("tp=1", 1), other.clone(), other.clone()]);
        assert!(verdict.holds(), "{verdict}");
        let told =
            "losses 7.5e-5 (within 1e-4), norms 8.0e-5 (within 1e-4), parameters w 9.5e-4 (within 1e-3)";
        assert!(verdict.to_string().contains(told), "{verdict}");
        let mut stage = run("tp=1", 1);
        stage.finals[1].1[0] = 1.0 + f32::EPSILON;
        let verdict = Verdict::of(&[run("tp=1", 0), stage]);
        assert!(!verdict.holds() && verdict.to_string().contains("DIFFER: b[0]"), "{verdict}");
        let (mut loss, mut norm) = (run("tp=1", 2), run("tp=1", 2));
        (loss.losses[0], norm.norms[1]) = (5.0f64.next_up(), 0.5f64.next_up());
        assert!(!Verdict::of(&[run("tp=1", 0), loss]).holds());
        assert!(!Verdict::of(&[run("tp=1", 0), norm]).holds());
    }

    #[test]
    fn what_is_too_far_or_no_number_does_not_hold() {
        let spoiled = |spoil: fn(&mut Trained)| {
            let mut other = run("tp=2", 0);
            spoil(&mut other);
            Verdict::of(&[run("tp=1", 0), other])
        };
        assert!(spoiled(|_| ()).holds());
        let far: [fn(&mut Trained); 5] = [
            |run| run.losses[0] = 5.0006,
            |run| run.losses[1] = f64::NAN,
            |run| run.norms[0] = 1.0002,
            |run| run.finals[0].1[1] = 0.0021,
            |run| run.finals[1].1[0] = f32::NAN,
        ];
        for spoil in far {
            let verdict = spoiled(spoil);
            assert!(!verdict.holds() && verdict.to_string().contains("NOT WITHIN"), "{verdict}");
        }
    }
}
