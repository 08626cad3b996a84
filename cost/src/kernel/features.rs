//! Probes BPF features that the programs need and that kernels before Linux 6.1 may lack.

#![allow(unsafe_code)]

use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr;

use libbpf_sys::{
    BPF_ALU64, BPF_ATOMIC, BPF_DW, BPF_EXIT, BPF_FUNC_get_current_task_btf, BPF_JMP, BPF_K,
    BPF_MAP_TYPE_RINGBUF, BPF_MAP_TYPE_TASK_STORAGE, BPF_MOV, BPF_PROG_TYPE_PERF_EVENT,
    BPF_PROG_TYPE_SOCKET_FILTER, BPF_STX, BPF_XCHG, bpf_insn, bpf_map_type, bpf_prog_load, bpf_prog_type,
    libbpf_probe_bpf_helper, libbpf_probe_bpf_map_type,
};

/// A BPF feature, the Linux version that introduced it, and a probe of the running kernel.
struct KernelFeature {
    name: &'static str,
    since: &'static str,
    is_there: fn() -> bool,
}

const FEATURES: [KernelFeature; 5] = [
    KernelFeature {
        name: "types of the kernel (CONFIG_DEBUG_INFO_BTF)",
        since: "5.4",
        is_there: || Path::new("/sys/kernel/btf/vmlinux").exists(),
    },
    KernelFeature { name: "ring buffers of BPF", since: "5.8", is_there: || has_map(BPF_MAP_TYPE_RINGBUF) },
    KernelFeature {
        name: "storage of BPF programs for each task",
        since: "5.11",
        is_there: || has_map(BPF_MAP_TYPE_TASK_STORAGE),
    },
    KernelFeature {
        name: "helper bpf_get_current_task_btf in programs that sample",
        since: "5.11",
        is_there: has_current_task,
    },
    KernelFeature { name: "atomic exchanges in BPF programs", since: "5.12", is_there: has_exchange },
];

/// Returns the needed features that the running kernel lacks, each with the Linux version that introduced it. Needs
/// root.
pub fn missing() -> Vec<String> {
    let missing = FEATURES.iter().filter(|feature| !(feature.is_there)());
    missing.map(|feature| format!("{} (Linux {})", feature.name, feature.since)).collect()
}

fn has_map(kind: bpf_map_type) -> bool {
    // SAFETY: the pointer to the options may be null.
    unsafe { libbpf_probe_bpf_map_type(kind, ptr::null()) == 1 }
}

fn has_current_task() -> bool {
    // SAFETY: the pointer to the options may be null.
    unsafe {
        libbpf_probe_bpf_helper(BPF_PROG_TYPE_PERF_EVENT, BPF_FUNC_get_current_task_btf, ptr::null()) == 1
    }
}

/// Reports whether the kernel loads a program that atomically exchanges a register with a word of its stack. libbpf has
/// no probe for instructions.
fn has_exchange() -> bool {
    const STACK: u8 = 10;
    const WORD: i16 = -8;
    let instruction = |code: u32, destination: u8, source: u8, off, imm: u32| {
        let mut instruction = bpf_insn { code: code as u8, off, imm: imm as i32, ..bpf_insn::default() };
        instruction.set_dst_reg(destination);
        instruction.set_src_reg(source);
        instruction
    };
    const MOVE: u32 = BPF_ALU64 | BPF_MOV | BPF_K;
    const STORE: u32 = BPF_STX | libbpf_sys::BPF_MEM | BPF_DW;
    let program = [
        instruction(MOVE, 1, 0, 0, 0),
        instruction(STORE, STACK, 1, WORD, 0),
        instruction(BPF_STX | BPF_ATOMIC | BPF_DW, STACK, 1, WORD, BPF_XCHG),
        instruction(MOVE, 0, 0, 0, 0),
        instruction(BPF_JMP | BPF_EXIT, 0, 0, 0, 0),
    ];
    let kind: bpf_prog_type = BPF_PROG_TYPE_SOCKET_FILTER;
    // SAFETY: the instructions and the license outlive the call, and nothing else owns the descriptor.
    unsafe {
        let license = c"Dual BSD/GPL".as_ptr();
        let fd = bpf_prog_load(
            kind,
            ptr::null(),
            license,
            program.as_ptr(),
            program.len() as u64,
            ptr::null_mut(),
        );
        fd >= 0 && {
            OwnedFd::from_raw_fd(fd);
            true
        }
    }
}
