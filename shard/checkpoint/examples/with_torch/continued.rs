//! Runs begun by PyTorch are continued as PyTorch continued them, from files that `bench/python/continue_in_torch.py --fixtures`
//! writes.

use super::problem::{AFTER, APART, BEFORE, CASES, apart, build, everything, small, train};
use meshstep_checkpoint as checkpoint;
use meshstep_checkpoint::pytorch::{Import, PyTorchFile};
use meshstep_comm::loopback::spawn;
use meshstep_shard::Stage;
use std::path::Path;

#[test]
fn ten_steps_after_pytorch_are_its_own() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/with_torch/recorded");
    let file = |name: String| PyTorchFile::new(folder.join(name + ".safetensors"));
    let shapes = small();
    for case in CASES {
        for (ranks, stage) in [(1, Stage::Replicated), (3, Stage::Zero2), (2, Stage::Zero1)] {
            let ends = spawn(ranks, |comm| {
                let mut opt = build(comm, case, &shapes, stage).unwrap();
                checkpoint::import_pytorch(&mut opt, &file(case.to_owned()), Import::default()).unwrap();
                let counted = !["nesterov", "dampening"].contains(&case);
                assert_eq!(opt.steps(), if counted { BEFORE } else { 0 }, "{case}");
                let first = everything(&mut opt).unwrap();
                train(&mut opt, case, &shapes, BEFORE + 1..=BEFORE + AFTER).unwrap();
                let ours = everything(&mut opt).unwrap();
                checkpoint::import_pytorch(&mut opt, &file(format!("{case}-end")), Import::default())
                    .unwrap();
                (first, ours, everything(&mut opt).unwrap())
            });
            let (first, ours, theirs) = ends.unwrap().into_iter().next().unwrap();
            assert!(ours.len() >= 2 * shapes.len());
            for (name, ours) in &ours {
                let (difference, moved) = (apart(ours, &theirs[name]), apart(&first[name], &theirs[name]));
                assert!(difference <= APART, "{case} on {ranks} ranks: {name} is {difference:e} apart");
                assert!(moved > 100.0 * APART, "{case}: {name} has moved by {moved:e} only");
            }
        }
    }
}
