//! Comparisons of a worker with the model after every call.

use super::{Trainer, again};
use crate::chaos::model::Did;
use crate::common::{self};
use meshstep_local::{LocalError, LocalOptimizer, LocalStep, Placement};
use meshstep_membership::{Error, Round};
use meshstep_shard::{Outcome, Step};

impl<'a> Trainer<'a> {
    /// Checks that a step reports the expected outcome.
    pub(super) fn told(
        &self,
        told: Result<LocalStep, LocalError>,
        heard: Option<Error>,
        did: &Did,
        [missing, skip]: [bool; 2],
    ) -> Result<(), LocalError> {
        let stubborn = self.place.world.setup.trouble.stubborn;
        match (told, heard) {
            (Err(LocalError::Shard(meshstep_shard::Error::Fault { .. })), _) if missing => Ok(()),
            (Err(LocalError::Membership(error)), Some(heard)) => {
                assert_eq!(error, heard);
                if stubborn && again(&error) { Ok(()) } else { Err(error.into()) }
            }
            (Ok(told), None) => {
                assert!(!missing && matches!(told.outcome, Outcome::Skipped { .. }) == skip, "{told:?}");
                let failed =
                    told.exchanged.failed.iter().map(|(f, _)| *f).chain(told.exchanged.given_up).collect();
                let exchanged = Did {
                    sent: told.exchanged.sent.into_iter().collect(),
                    merged: told.exchanged.merged.into_iter().collect(),
                    failed,
                };
                assert!(self.model.is_none() || exchanged == *did, "{exchanged:?} for {did:?}");
                Ok(())
            }
            (told, heard) => panic!("{told:?} where {heard:?}"),
        }
    }

    /// Records a committed exchange, and checks that the worker has applied the one before.
    pub(super) fn applies(&self, round: &Round) {
        let mut inner = self.place.lock();
        let before = inner.truth.commit_before(round.number);
        let applied = &mut inner.lives[self.place.life].applied;
        assert!(
            applied.is_empty() || applied.last().copied() == before,
            "{before:?} is missing: {applied:?}"
        );
        applied.push(round.number);
    }

    /// Checks that values averaged without delay and mixing are bit-equal on all workers that have them.
    pub(super) fn agree(&self, round: &Round, did: &Did) {
        let (place, setup) = (self.place, &self.place.world.setup);
        let Some(model) = &self.model else { panic!("a worker without known state applied an exchange") };
        for &f in &did.merged {
            let fragment = &setup.plan.fragments[f];
            if fragment.timing.delay == 0
                && fragment.taken == 1.0
                && fragment.timing.placement == Placement::After
            {
                let values = model.take(fragment, setup.run.rule);
                let bits: Vec<u64> = values.iter().flatten().map(|x| x.to_bits()).collect();
                place.lock().truth.check_merged(round.number, f, common::hash(&bits));
            }
        }
    }

    /// Compares the worker's state with the model.
    pub(super) fn check(&mut self, local: &LocalOptimizer, when: &str) {
        let Some(model) = &self.model else { return };
        let setup = &self.place.world.setup;
        assert_eq!(local.steps(), model.step, "{when}");
        let mut hashes = [0; 3];
        for (i, vectors) in model.vectors.iter().enumerate() {
            let params = common::floats(local.optimizer(), &common::name(i));
            let state = local.state(&common::name(i)).unwrap();
            let part = state.range.clone();
            assert!(part.is_empty() || state.t == model.t, "{when}: {} for {}", state.t, model.t);
            let slots = state.slots.iter().map(|(_, slot)| slot.typed::<f32>().unwrap().to_vec());
            let has: Vec<Vec<f32>> = std::iter::once(params).chain(slots).collect();
            for (k, vector) in vectors.iter().enumerate() {
                // All of the parameter, but only this rank's part of its state.
                let vector = if k == 0 { &vector[..] } else { &vector[part.clone()] };
                if vector.is_empty() {
                    continue;
                }
                let bit = |x: &f32| if x.is_nan() { u64::MAX } else { x.to_bits().into() };
                let bits = |values: &[f32]| values.iter().map(bit).collect::<Vec<u64>>();
                assert!(
                    bits(&has[k]) == bits(vector),
                    "worker {}, vector {k} of parameter {i} {when} in step {}: {:?} for {vector:?}, {:?}",
                    self.place.life,
                    local.steps(),
                    has[k],
                    setup.plan
                );
                hashes[k.min(2)] = common::hash(&[&[hashes[k.min(2)]], &bits(vector)[..]].concat());
            }
        }
        let mut inner = self.place.lock();
        inner.note(format!("{} {when} in step {}: {hashes:x?}", self.place.life, local.steps()));
        inner.lives[self.place.life].hashes.push((local.steps(), hashes));
    }
}
