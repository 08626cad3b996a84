//! Compiles the programs' parsers natively.

fn main() {
    millrace_kernel_build::main_with(&[
        "../../relay/kernel/src/bpf",
        "../../gate/src/bpf",
        "../../graft/kernel/src/bpf",
        "../../fanout/src/bpf",
    ]);
}
