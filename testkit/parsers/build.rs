//! Compiles the parsers of all BPF programs natively.

fn main() {
    let folders = [
        "../../relay/kernel/src/bpf",
        "../../gate/src/bpf",
        "../../graft/kernel/src/bpf",
        "../../fanout/src/bpf",
    ];
    folders
        .into_iter()
        .fold(millrace_kernel_build::Build::default(), millrace_kernel_build::Build::folder)
        .run();
}
