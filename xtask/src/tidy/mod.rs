//! `tidy`: what a compiler does not see. Every rule is a function from data to complaints, in a file beside this one.

mod complaint;
mod docs;
mod edges;
mod entries;
mod examples;
mod files;
mod functions;
mod graph;
mod knots;
mod links;
mod measures;
mod prose;
mod rooms;
mod sources;
mod step_types;

use crate::cli::TidyArgs;
use crate::workspace::Workspace;
use anyhow::bail;
use complaint::{Complaint, File};
use measures::Measure;

/// Checks the tree and prints every complaint; an error if there is one.
pub(crate) fn run(args: &TidyArgs, workspace: &Workspace) -> anyhow::Result<()> {
    let files = files::read(&workspace.root)?;
    let measures = measures(workspace, &files);
    if args.measures {
        measures::summary(&measures).iter().for_each(|line| println!("{line}"));
    }
    let mut complaints = complaints(workspace, &files);
    complaints.extend(measures::complaints(measures, args.goals));
    verdict(&complaints)?;
    println!("tidy: {} members and {} files are as they should be", workspace.members.len(), files.len());
    Ok(())
}

/// Checks that the flags of `cargo xtask train` in the documents are in `help`, which only the built program knows.
pub(crate) fn check_flags(workspace: &Workspace, help: &str) -> anyhow::Result<()> {
    verdict(&docs::train_flags(&files::read(&workspace.root)?, help))
}

fn verdict(complaints: &[Complaint]) -> anyhow::Result<()> {
    for complaint in complaints {
        println!("{complaint}");
    }
    match complaints.len() {
        0 => Ok(()),
        n => bail!("tidy has {n} complaint(s), printed above"),
    }
}

/// A rule about files.
type FileRule = fn(&[File]) -> Vec<Complaint>;

fn complaints(workspace: &Workspace, files: &[File]) -> Vec<Complaint> {
    let rules: [FileRule; 6] = [
        sources::headers,
        sources::lengths,
        sources::forbidden,
        docs::required,
        docs::commands,
        links::links,
    ];
    let about_files = rules.iter().flat_map(|rule| rule(files));
    edges::check(&workspace.members).into_iter().chain(about_files).collect()
}

fn measures(workspace: &Workspace, files: &[File]) -> Vec<Measure> {
    let folders: Vec<&str> = workspace.members.iter().map(|member| member.folder.as_str()).collect();
    let mut measures = prose::measure(files);
    measures.extend(knots::measure(files, &folders));
    measures.extend(rooms::measure(files));
    measures.extend(functions::measure(files, &folders));
    measures.extend(step_types::measure(files));
    measures.extend(entries::measure(files, &folders));
    measures.extend(examples::measure(files, &folders));
    measures.push(entries::test_programs(&workspace.test_programs));
    measures
}

#[cfg(test)]
mod tests {
    use super::complaint::tests::file;
    use super::*;
    use crate::workspace::Member;

    #[test]
    fn every_rule_is_asked() {
        let workspace = Workspace {
            root: ".".into(),
            target: "target".into(),
            members: ["c", "shard"]
                .map(|name| Member {
                    name: name.to_owned(),
                    folder: name.to_owned(),
                    dependencies: Vec::new(),
                })
                .into(),
            test_programs: (0..20).map(|idx| format!("a/tests/x{idx}.rs")).collect(),
        };
        let modules: String = (0..20).map(|idx| format!("mod x{idx};\n")).collect();
        let circle = |idx| format!("//! X.\nuse crate::x{}::X;\npub struct X;\n", (idx + 1) % 20);
        let long = "\n".repeat(500);
        let mut files = vec![
            file("a/src/lib.rs", &long),
            file("a/src/b.rs", concat!("//! B.\nfn b() { to", "do!() }")),
            file("c/src/lib.rs", &format!("//! Whether a sentence is one.\n{modules}")),
            file("c/src/long.rs", &format!("//! L.\nfn f() {{{}}}\n", "\n".repeat(29))),
            file("comm/src/lib.rs", "//! L.\nmod nccl;\nmod sync;\n"),
            file("shard/src/lib.rs", "//! S.\npub use never::Never;\n"),
            file("comm/src/nccl/mod.rs", "//! N.\npub struct N;\n"),
            file("comm/src/sync/mod.rs", "//! S.\nuse crate::nccl::N;\n"),
            file("README.md", "```sh\ncargo xtask fly\n```\n[gone](gone.md)\n"),
        ];
        files.extend((0..20).map(|idx| file(&format!("c/src/x{idx}.rs"), &circle(idx))));
        let measured = measures::complaints(measures(&workspace, &files), false);
        let all = complaints(&workspace, &files).into_iter().chain(measured);
        let all: Vec<String> = all.map(|complaint| complaint.to_string()).collect();
        let expected = [
            "is no member",
            "a/src/lib.rs:1: ",
            "a/src/lib.rs: 500 lines",
            "a/src/b.rs:2: ",
            "README.md:2: ",
            "README.md:4: the link",
            "LICENSE-MIT: ",
            "c: sentences that open with a pronoun 100.0 % = 1 of 1",
            "c/src/lib.rs:1: ",
            "c: files in the largest knot 20",
            "comm/src/sync/mod.rs:2: sync imports from",
            "c: entries in src 22",
            "shard: public types in no example 1 ",
            "tree: lines of a median function 30",
            "a/tests/x19.rs: ",
        ];
        for part in expected {
            assert!(all.iter().any(|line| line.contains(part)), "no complaint has {part:?}: {all:#?}");
        }
    }
}
