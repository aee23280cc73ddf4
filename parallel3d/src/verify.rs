//! Verification in the mesh's terms: axes along which ranks differ, their coordinates, and the element of the whole parameter.

use crate::{Axes, Axis, Communicators, Differs, Error, Optimizer};
use meshstep_shard::{Difference, Stage, gather_words};
use meshstep_tensor::{Buffer, Category, Place};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Result of a verification that found no difference.
///
/// ```
/// use meshstep_parallel3d::{Alike, Axis, Differs, Error, Mesh, Model, Optimizer, Placement, Verified};
/// use meshstep_tensor::DType::F32;
///
/// let model = Model::builder().param("w", &[4], F32, Placement::whole().cut(Axis::Tp, 0)).build()?;
/// let mesh: Mesh = "tp=2".parse()?;
/// let report = |differs: &Differs| format!("{} differs at element {:?}", differs.difference.param, differs.element);
/// let ranks = meshstep_comm::loopback::spawn(2, |world| -> Result<Vec<Alike>, Error> {
///     // Both ranks begin their halves with the same values, which is probably a mistake.
///     let first = |_: &_, _: &[_], mut out: meshstep_tensor::SliceMut<'_>| out.copy_from((&[1f32, 2.0]).into());
///     let mut opt = Optimizer::new(world, mesh.clone(), &model, meshstep_optim::Sgd::default(), first, Default::default())?;
///     let Verified { alike, .. } = opt.verify().inspect_err(|error| match error {
///         Error::Differs(differs) => println!("{}", report(differs)),
///         other => println!("{other}"),
///     })?;
///     Ok(alike)
/// })?;
/// for alike in ranks {
///     assert_eq!(alike?, [Alike { param: "w".to_owned(), axes: Axis::Tp.into(), ranks: vec![0, 1] }]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Compared vectors, with the cost of comparing them.
    pub of: meshstep_shard::Verified,
    /// Parts of cut parameters that are equal among the ranks that share them with this rank, although parts normally differ. Not an
    /// error, but a sign that parts were initialised or loaded identically.
    pub alike: Vec<Alike>,
}

/// Ranks with equal bits in their parts of a parameter; parts with a single repeated value are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alike {
    /// The parameter.
    pub param: String,
    /// Axes along which the parameter is cut.
    pub axes: Axes,
    /// The ranks, ascending.
    pub ranks: Vec<usize>,
}

impl Optimizer {
    /// [`meshstep_shard::Optimizer::verify`] on a mesh. Ranks that should hold equal values compare them: parameters along the axes that
    /// do not cut the parameter, state along these axes without the ones that divide it. A difference is [`Error::Differs`]. Collective.
    ///
    /// Parts of cut parameters that are suspiciously equal are not an error: the result lists them, and a warning is traced.
    pub fn verify(&mut self) -> Result<Verified, Error> {
        let of = self.inner.verify().map_err(|error| self.located(error))?;
        let alike = self.alike(&of.hashes)?;
        Ok(Verified { of, alike })
    }

    pub(crate) fn located(&self, error: meshstep_shard::Error) -> Error {
        self.site.located(error)
    }

    /// Returns the location of a difference on the mesh.
    pub fn locate(&self, difference: Difference) -> Differs {
        self.site.locate(difference)
    }

    /// Returns the ranks with equal parts of a cut parameter. Collective along the axes of the cuts; a rank that fails ends the call for
    /// all.
    fn alike(&mut self, hashes: &[u64]) -> Result<Vec<Alike>, Error> {
        let cuts = self.cuts();
        let (mesh, made) = (self.mesh().clone(), self.across_cuts.take());
        let (found, _) = self.inner.apart_from_steps(|inner| {
            let comms = match made {
                Some(comms) => comms,
                None => Communicators::new(Arc::clone(inner.comm()), mesh, cuts.keys().copied())
                    .map_err(of_group)?,
            };
            inner.end_with(comms.all_along().cloned());
            let alike: Result<Vec<_>, _> =
                cuts.iter().map(|(&axes, params)| alike_along(inner, &comms, axes, params, hashes)).collect();
            Ok((comms, alike?))
        })?;
        self.across_cuts = Some(found.0);
        let alike: Vec<Alike> = found.1.into_iter().flatten().collect();
        let rank = self.inner.comm().rank();
        for Alike { param, axes, ranks } in alike.iter().filter(|alike| alike.ranks[0] == rank) {
            tracing::warn!(param, %axes, ?ranks, "parts of a cut parameter are the same on several ranks");
        }
        Ok(alike)
    }

    /// Returns the cut parameters by the axes along which ranks have different parts: each with its index among the hashes, and its name.
    fn cuts(&self) -> BTreeMap<Axes, Vec<(usize, String)>> {
        let mut cuts: BTreeMap<Axes, Vec<(usize, String)>> = BTreeMap::new();
        for (i, param) in self.inner.params().enumerate() {
            let Some(parameter) = self.site.model.get(param.name()) else { continue };
            let whole = parameter.placement.sharing(self.mesh()).replicas | Axis::Pp;
            let axes = self.mesh().all().without(whole);
            if self.mesh().degree(axes) > 1 {
                cuts.entry(axes).or_default().push((i, parameter.name.clone()));
            }
        }
        cuts
    }
}

/// Returns the ranks along `axes` with equal parts of these parameters. Collective along `axes`.
fn alike_along(
    inner: &meshstep_shard::Optimizer,
    comms: &Communicators,
    axes: Axes,
    params: &[(usize, String)],
    hashes: &[u64],
) -> Result<Vec<Alike>, meshstep_shard::Error> {
    let mut words = Vec::new();
    for (i, name) in params {
        words.extend([hashes[*i], u64::from(is_constant(inner, name)?)]);
    }
    let all = gather_words(&**comms.along(axes).map_err(of_group)?, inner.options(), &words)?;
    let group = comms.mesh().group(inner.comm().rank(), axes).map_err(|error| of_group(error.into()))?;
    let group: Vec<usize> = group.ranks().collect();
    let mut alike = Vec::new();
    for (k, (_, name)) in params.iter().enumerate() {
        let of = |place: usize| (all[place * words.len() + 2 * k], all[place * words.len() + 2 * k + 1] > 0);
        alike.extend(classes((0..group.len()).map(of)).into_iter().map(|places| Alike {
            param: name.clone(),
            axes,
            ranks: places.into_iter().map(|place| group[place]).collect(),
        }));
    }
    Ok(alike)
}

/// Converts an error of the groups along the cuts' axes to an error of one group.
fn of_group(error: Error) -> meshstep_shard::Error {
    match error {
        Error::Split { source, .. } => source.into(),
        Error::Shard(error) => error,
        other => unreachable!("the mesh has the axes of its cuts: {other}"),
    }
}

/// Returns true if all elements of this rank's part have the same bytes.
fn is_constant(inner: &meshstep_shard::Optimizer, name: &str) -> Result<bool, meshstep_shard::Error> {
    let options = inner.options();
    let values = if options.stage == Stage::Zero3 { inner.state(name)?.values } else { inner.param(name)? };
    let mut host = None;
    let values = if values.place() == Place::Cpu {
        values
    } else {
        let copy = Buffer::zeroed(values.len(), values.dtype(), &options.meter, Category::Staging)?;
        let copy: &mut Buffer = host.insert(copy);
        options.queue.download(values, copy.as_mut())?;
        copy.as_slice()
    };
    let mut elements = values.bytes()?.chunks_exact(values.dtype().size());
    let first = elements.next();
    Ok(elements.all(|element| Some(element) == first))
}

/// Returns groups of places with equal hashes, without constant ones and without groups of one.
fn classes(hashes: impl Iterator<Item = (u64, bool)>) -> Vec<Vec<usize>> {
    let mut classes: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (place, (hash, constant)) in hashes.enumerate() {
        if !constant {
            classes.entry(hash).or_default().push(place);
        }
    }
    let mut classes: Vec<_> = classes.into_values().filter(|places| places.len() > 1).collect();
    classes.sort();
    classes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_constant_is_not_suspicious() {
        let of = |hashes: &[(u64, bool)]| classes(hashes.iter().copied());
        assert_eq!(of(&[(1, false), (2, false), (1, false), (2, false), (3, false)]), [[0, 2], [1, 3]]);
        assert!(of(&[(1, true), (1, true), (2, false)]).is_empty());
    }
}
