//! `complaints`: runs the tests that answer public reports about other systems, and prints a line for each.

use crate::ci::report::seconds;
use crate::ci::task::ALL;
use crate::cmd::Cmd;
use crate::workspace::Workspace;
use std::process::ExitCode;
use std::time::Instant;

/// A public report, and the test that shows the case here.
struct Complaint {
    /// Repository and number of the report.
    report: &'static str,
    /// The failure that it describes.
    failure: &'static str,
    /// Result of the test.
    here: &'static str,
    package: &'static str,
    /// Whole name of the test.
    test: &'static str,
}

const COMPLAINTS: [Complaint; 10] = [
    Complaint {
        report: "cudarc#584",
        failure: "a collective of a rank that never comes hangs",
        here: "a typed error on every rank at the deadline",
        package: "meshstep-comm",
        test: "failures::deadlines::a_rank_that_is_too_late_or_never_comes",
    },
    Complaint {
        report: "nccl#1013",
        failure: "an abort on one rank does not end the others' operations",
        here: "an abort ends waiting operations on every rank",
        package: "meshstep-comm",
        test: "failures::misuse::an_abort_ends_waiting_operations_on_every_rank",
    },
    Complaint {
        report: "horovod#2640",
        failure: "a subset of ranks submits a tensor: deadlock",
        here: "an error on every rank names rank and parameter; the run goes on",
        package: "meshstep-shard",
        test: "complaints::horovod_2640_a_gradient_of_some_ranks_is_an_error_that_names_rank_and_parameter",
    },
    Complaint {
        report: "composer#1319",
        failure: "one rank fails in its backward pass, the others wait",
        here: "the step is an error on every rank; the run goes on",
        package: "meshstep-shard",
        test: "complaints::composer_1319_a_backward_pass_that_fails_on_one_rank_ends_the_step_of_all",
    },
    Complaint {
        report: "facebookresearch/optimizers#149",
        failure: "ranks without gradients count other steps",
        here: "equal counts on every rank at every stage",
        package: "meshstep-shard",
        test: "complaints::facebookresearch_optimizers_149_step_counts_are_equal_whatever_gradients_are_missing",
    },
    Complaint {
        report: "DeepSpeed#1488",
        failure: "the loss depends on the stage when gradients accumulate",
        here: "equal bits at every stage, with sums that are exact",
        package: "meshstep-shard",
        test: "complaints::deepspeed_1488_every_stage_ends_alike_with_several_micro_batches",
    },
    Complaint {
        report: "DeepSpeed#6767, #2686",
        failure: "clipping does nothing, or its norm contains the loss scale",
        here: "the update has the norm that was asked for, at any loss scale",
        package: "meshstep-shard",
        test: "complaints::deepspeed_6767_and_2686_the_update_has_the_norm_that_was_asked_for_at_any_loss_scale",
    },
    Complaint {
        report: "rocm-systems#11661",
        failure: "bits change with the bucket size",
        here: "equal bits for seven bucket sizes",
        package: "meshstep-shard",
        test: "complaints::rocm_systems_11661_the_bucket_size_changes_no_bit",
    },
    Complaint {
        report: "candle#3819",
        failure: "optimizer state cannot be saved, so no run resumes",
        here: "a run of candle variables resumes on other ranks with the same bits",
        package: "meshstep-candle",
        test: "checkpoint::a_checkpoint_of_two_ranks_goes_on_on_four",
    },
    Complaint {
        report: "KempnerForge#102",
        failure: "the latest checkpoint is announced before it is durable",
        here: "the newest step is complete whenever a job is killed",
        package: "meshstep-checkpoint",
        test: "killed::what_is_newest_is_complete_whenever_a_job_is_killed",
    },
];

/// Runs every test, and fails if one fails or does not exist.
pub(crate) fn run(workspace: &Workspace) -> anyhow::Result<ExitCode> {
    let mut failed = 0;
    for complaint in &COMPLAINTS {
        let start = Instant::now();
        let passed = command(complaint).dir(&workspace.root).silent()?.success();
        failed += usize::from(!passed);
        let verdict = if passed { "holds" } else { "FAILS" };
        println!(
            "{:<32} {:<60} {verdict} {:>8}",
            complaint.report,
            complaint.failure,
            seconds(start.elapsed())
        );
        println!("{:32} {}: {}", "", complaint.here, complaint.test);
    }
    println!("{} of {} complaints answered", COMPLAINTS.len() - failed, COMPLAINTS.len());
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A run of no test fails.
fn command(complaint: &Complaint) -> Cmd {
    let filter = format!("package(={}) & test(={})", complaint.package, complaint.test);
    Cmd::cargo(&format!("nextest run --config-file xtask/nextest.toml {ALL} -E")).arg(&filter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_report_and_each_test_is_there_once() {
        for (i, complaint) in COMPLAINTS.iter().enumerate() {
            let others = &COMPLAINTS[i + 1..];
            assert!(
                others.iter().all(|other| other.report != complaint.report && other.test != complaint.test)
            );
        }
    }

    #[test]
    fn a_test_runs_by_its_whole_name() {
        let shown = command(&COMPLAINTS[0]).to_string();
        assert!(shown.contains("-E 'package(=meshstep-comm) & test(=failures::deadlines::a_rank"), "{shown}");
    }
}
