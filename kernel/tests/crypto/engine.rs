//! Runs the packet protection written in C in two ways: compiled natively into this test, and as a BPF program in the
//! kernel.

#![allow(unsafe_code)]

use libbpf_rs::{MapCore, MapFlags, Object, ObjectBuilder, ProgramInput};
use millrace_kernel::crypto::{QuicKeys, TAG_LEN, TEXT_MAX};
use std::time::Duration;

/// Test operations, with the values of `enum crypto_operation` in C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    Seal = 0,
    SealInPlace,
    SealWith,
    Open,
    OpenWith,
    Keystream,
    Protect,
    Unprotect,
    Number,
}

pub const BUF_LEN: usize = 4096;
pub const HEADER_MAX: usize = 528;
pub const AT_MAX: usize = 2047;

/// The layout of `struct quic_buf` in C.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Buf {
    pub bytes: [u8; BUF_LEN],
    pub once: [u8; 64],
    pub text: [u8; TEXT_MAX],
    scratch: [u64; 25],
}

/// The layout of `struct quic_extent` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CryptoExtent {
    pub header_at: u32,
    pub header_bytes: u32,
    pub plain_at: u32,
    pub text_bytes: u32,
}

/// The layout of `struct quic_short` in C.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CryptoShort {
    pub first: u8,
    pub number_bytes: u8,
    pub pad: u16,
    pub number: u32,
}

/// The layout of `struct crypto_case` in C.
#[repr(C)]
#[derive(Clone)]
pub struct CryptoCase {
    operation: u32,
    result: i32,
    pub number: u64,
    pub extent: CryptoExtent,
    pub id_bytes: u32,
    pub header: CryptoShort,
    pad: u32,
    keys: QuicKeys,
    pub packet: Buf,
    pub plain: Buf,
}

impl CryptoCase {
    /// Makes the input of a test operation. Memory on which the result must not depend has random contents.
    pub fn new(keys: &QuicKeys) -> Box<Self> {
        let buf = || Buf {
            bytes: std::array::from_fn(|_| fastrand::u8(..)),
            once: [fastrand::u8(..); 64],
            text: [fastrand::u8(..); TEXT_MAX],
            scratch: [fastrand::u64(..); 25],
        };
        Box::new(Self {
            operation: 0,
            result: 0,
            number: 0,
            extent: CryptoExtent::default(),
            id_bytes: 0,
            header: CryptoShort::default(),
            pad: 0,
            keys: *keys,
            packet: buf(),
            plain: buf(),
        })
    }

    /// Makes the input for sealing a text after a header, both at random offsets.
    pub fn to_seal(keys: &QuicKeys, number: u64, header: &[u8], text: &[u8]) -> Box<Self> {
        let mut case = Self::new(keys);
        case.number = number;
        case.place(header, text.len());
        let at = case.extent.plain_at as usize;
        case.plain.bytes[at..at + text.len()].copy_from_slice(text);
        case
    }

    /// Makes the input for opening a sealed packet.
    pub fn to_open(keys: &QuicKeys, number: u64, header: &[u8], sealed: &[u8]) -> Box<Self> {
        let mut case = Self::new(keys);
        case.number = number;
        case.place(header, sealed.len() - TAG_LEN);
        let at = case.text_at();
        case.packet.bytes[at..at + sealed.len()].copy_from_slice(sealed);
        case
    }

    fn place(&mut self, header: &[u8], text_bytes: usize) {
        let header_at = fastrand::usize(0..=AT_MAX - header.len());
        self.extent = CryptoExtent {
            header_at: header_at as u32,
            header_bytes: header.len() as u32,
            plain_at: fastrand::u32(0..=AT_MAX as u32),
            text_bytes: text_bytes as u32,
        };
        self.packet.bytes[header_at..header_at + header.len()].copy_from_slice(header);
    }

    pub fn text_at(&self) -> usize {
        (self.extent.header_at + self.extent.header_bytes) as usize
    }

    /// Returns the sealed text with its tag, or the opened text.
    pub fn text(&self, len: usize) -> &[u8] {
        &self.packet.bytes[self.text_at()..][..len]
    }

    fn as_bytes(&self) -> &[u8] {
        // SAFETY: the type is `repr(C)` with integers and without padding. Its size is compared with the map's when
        // loading.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the type is `repr(C)` with integers and without padding, and every bit pattern is a valid value.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::from_mut(self).cast(), size_of::<Self>()) }
    }
}

unsafe extern "C" {
    fn crypto_native_run(case: *mut CryptoCase);
}

pub enum CryptoEngine {
    Native,
    Kernel(Object),
}

impl CryptoEngine {
    /// Returns the native engine, and the kernel's engine if the test may load programs.
    pub fn all(test: &str) -> Vec<Self> {
        let mut engines = vec![Self::Native];
        if let Some(kernel) = Self::kernel(test) {
            engines.push(kernel);
        }
        engines
    }

    pub fn kernel(test: &str) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP {test} in the kernel: needs root");
            return None;
        }
        // The object is embedded, so that the test also runs on other machines. libelf needs an aligned image, as a
        // `Vec` is.
        let image = include_bytes!(concat!(env!("OUT_DIR"), "/crypto_test.bpf.o")).to_vec();
        let object =
            ObjectBuilder::default().open_memory(&image).expect("an object").load().expect("it loads");
        let size = object.maps().find(|map| map.name() == "cases").expect("the map").value_size();
        assert_eq!(size as usize, size_of::<CryptoCase>());
        Some(Self::Kernel(object))
    }

    /// Runs an operation on `case`, which also receives the output. Returns the operation's result.
    pub fn run(&self, operation: Operation, case: &mut CryptoCase) -> i32 {
        case.operation = operation as u32;
        match self {
            // SAFETY: `CryptoCase` has the layout of `struct crypto_case`, and the reference is exclusive.
            Self::Native => unsafe { crypto_native_run(case) },
            Self::Kernel(object) => {
                run_in_kernel(object, case, 1);
            }
        }
        case.result
    }

    /// Returns the mean time of `repeat` runs, including the time to enter the BPF program, or `None` for the native
    /// code.
    pub fn time(&self, operation: Operation, case: &mut CryptoCase, repeat: u32) -> Option<Duration> {
        case.operation = operation as u32;
        match self {
            Self::Native => None,
            Self::Kernel(object) => Some(run_in_kernel(object, case, repeat)),
        }
    }
}

fn run_in_kernel(object: &Object, case: &mut CryptoCase, repeat: u32) -> Duration {
    let map = object.maps().find(|map| map.name() == "cases").expect("the map");
    let program = object.progs_mut().find(|program| program.name() == "crypto_run").expect("the program");
    let key = 0u32.to_ne_bytes();
    map.update(&key, case.as_bytes(), MapFlags::ANY).expect("update");
    let frame = [0; 64];
    let output = program.test_run(ProgramInput { data_in: Some(&frame), repeat, ..Default::default() });
    let value = map.lookup(&key, MapFlags::ANY).expect("look-up").expect("a value");
    case.as_bytes_mut().copy_from_slice(&value);
    output.expect("a test run").duration
}
