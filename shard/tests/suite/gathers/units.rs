//! Names of units and of their parameters.

use super::{build, first, layout, param_of, step};
use crate::common::fetch;
use meshstep_comm::loopback;
use meshstep_optim::Sgd;
use meshstep_shard::{Error, Optimizer, Options, Stage, UnitError};
use meshstep_tensor::{Category, DType, Layout, LayoutBuilder};

#[test]
fn what_is_asked_of_the_wrong_unit_is_told() {
    loopback::spawn(2, |comm| {
        let mut opt = build(comm, Options::default()).unwrap();
        assert_eq!(opt.units().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
        assert_eq!((opt.unit_of("b.w").unwrap(), opt.unit_of("f").unwrap()), (Some("b"), None));
        let unit = |error: Error| match error {
            Error::Unit(error) => error,
            other => panic!("{other}"),
        };
        let (a, b) = ("a".to_owned(), "b".to_owned());
        let sharded = UnitError::Sharded { name: "b.w".into(), unit: b.clone() };
        assert_eq!(unit(opt.param("b.w").unwrap_err()), sharded);
        assert_eq!(opt.param("f").unwrap().len(), 3);
        let unknown = UnitError::Unknown { unit: "e".into(), count: 4 };
        assert_eq!(unit(opt.gather("e").unwrap_err()), unknown);
        let held = opt.gather("a").unwrap();
        assert_eq!(unit(opt.gather("a").unwrap_err()), UnitError::Taken { unit: a.clone() });
        let elsewhere = UnitError::Elsewhere { name: "b.w".into(), unit: b, gathered: a };
        assert_eq!(unit(held.param("b.w").unwrap_err()), elsewhere);
        assert!(matches!(held.param("x"), Err(Error::UnknownParam { .. })));
        drop(held);
        // No refused call was a gather.
        drop(opt.gather("a").unwrap());
        step(&mut opt).unwrap();
    })
    .unwrap();
}

/// A tied parameter that names its bucket's unit gathers it by either name; no other unit has its second name.
#[test]
fn a_unit_goes_by_every_name_of_its_parameter() {
    let layout = || {
        let add = |layout: LayoutBuilder, name: &str| layout.param(name, &[9], DType::F32);
        let layout = add(add(Layout::builder(), "table").unit("block"), "w");
        add(layout.unit("last"), "x").build().unwrap()
    };
    for stage in crate::common::STAGES {
        loopback::spawn(2, |comm| {
            let options = Options { stage, ..Options::default() };
            let mut opt = Optimizer::new(comm, layout(), Sgd::default(), first, options).unwrap();
            opt.also_called("head", "table").unwrap();
            // A name of another unit does not name this one.
            ["v", "last"].iter().for_each(|alias| opt.also_called(alias, "w").unwrap());
            assert_eq!(opt.gather("last").unwrap().unit(), "last");
            let read = |opt: &Optimizer, unit: &str, name: &str| {
                let here = opt.gather(unit).unwrap();
                (here.unit().to_owned(), fetch(here.param(name).unwrap(), &opt.options().queue))
            };
            let table = read(&opt, "table", "table");
            assert_eq!(table.0, "table");
            for (unit, name) in [("head", "head"), ("head", "table"), ("table", "head")] {
                assert_eq!(read(&opt, unit, name), table, "{unit} {name} {stage:?}");
            }
            assert_eq!(opt.unit_of("head").unwrap(), Some("table"));
            // A parameter in a named unit does not name a unit.
            for name in ["v", "w"] {
                let told = opt.gather(name).unwrap_err();
                assert!(matches!(told, Error::Unit(UnitError::Unknown { count: 3, .. })), "{told}");
            }
            let clash = opt.also_called("block", "table");
            let later = Layout::builder().unit("head").param("late", &[3], DType::F32).build().unwrap();
            let later = opt.add_param_group(later, Sgd::default(), first);
            if stage == Stage::Zero3 {
                for (told, expected) in [(clash, "block"), (later, "head")] {
                    let told = told.unwrap_err();
                    let two = UnitError::TwoOfOneName { name: expected.into() };
                    assert!(matches!(&told, Error::Unit(error) if *error == two), "{told}");
                }
                assert_eq!(opt.params().count(), 3);
            } else {
                clash.and(later).unwrap();
            }
        })
        .unwrap();
    }
}

/// A parameter that does not name its bucket's unit may have the name of a unit.
#[test]
fn a_unit_may_have_a_name_by_which_nothing_is_gathered() {
    let add = |layout: LayoutBuilder, name: &str| layout.param(name, &[9], DType::F32);
    loopback::spawn(2, |comm| {
        let options = Options { stage: Stage::Zero3, ..Options::default() };
        let layout = add(add(add(Layout::builder(), "a"), "u").unit("u"), "w").build().unwrap();
        let mut opt = Optimizer::new(comm, layout, Sgd::default(), first, options).unwrap();
        opt.also_called("u", "u").unwrap();
        // Another name of that parameter does not gather either.
        opt.also_called("z", "u").unwrap();
        let told = opt.gather("z").unwrap_err();
        assert!(matches!(told, Error::Unit(UnitError::Unknown { .. })), "{told}");
        let later = add(Layout::builder().unit("v"), "late").build().unwrap();
        opt.add_param_group(later, Sgd::default(), first).unwrap();
        assert_eq!(opt.units().collect::<Vec<_>>(), ["a", "u", "v"]);
        assert_eq!(opt.gather("u").unwrap().param("w").unwrap().len(), 9);
        assert_eq!(opt.gather("a").unwrap().param("u").unwrap().len(), 9);
    })
    .unwrap();
}

/// Units also work at stages with whole parameters, so that a model need not know the stage.
#[test]
fn units_are_there_at_every_stage() {
    for stage in crate::common::STAGES {
        loopback::spawn(2, |comm| {
            let options = Options { stage, ..Options::default() };
            let opt = Optimizer::new(comm, layout(), Sgd::default(), first, options).unwrap();
            let units: Vec<String> = opt.units().map(str::to_owned).collect();
            assert_eq!(units, ["a", "b", "c", "d"]);
            for unit in &units {
                let here = opt.gather(unit).unwrap();
                let name = format!("{unit}.w");
                assert_eq!(fetch(here.param(&name).unwrap(), &opt.options().queue), param_of(&name));
            }
        })
        .unwrap();
    }
}

/// A later group's parameters join the units of the same names.
#[test]
fn later_groups_join_units() {
    loopback::spawn(2, |comm| {
        let mut opt = build(comm, Options::default()).unwrap();
        let late = Layout::builder().unit("b").param("b.late", &[200], DType::F32).unit("e");
        let late = late.param("e.w", &[1], DType::F32).build().unwrap();
        opt.add_param_group(late, Sgd::default(), first).unwrap();
        assert_eq!(opt.units().collect::<Vec<_>>(), ["a", "b", "c", "d", "e"]);
        let b = opt.gather("b").unwrap();
        let seen = ["b.w", "b.late"].map(|name| b.param(name).unwrap().typed::<f32>().unwrap()[99]);
        assert_eq!(seen, [693.0 + 3.0 + 98.0, 693.0 + 6.0 + 98.0]);
        drop(b);
        // b has grown, and with it the memory for b and c; c and d still take more.
        assert_eq!(opt.options().meter.peak(Category::Gathered), (128 + 384) * 4);
        assert_eq!(opt.options().meter.live(Category::Gathered), (128 + 384) * 4);
    })
    .unwrap();
}
