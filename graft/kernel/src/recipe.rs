//! A recipe: the instructions of a congestion control after libbpf has relocated them once.
//!
//! For each object that it loads, libbpf parses the kernel's BTF (7 MB on the measured host) and searches it for every
//! structure that the object names. That takes five times as long as the verifier. The result depends neither on the
//! values of parameters nor on time, since the kernel does not change while it runs. Therefore the relocated
//! instructions are cached after the first load. Later loads take only system calls; the verifier checks the programs
//! each time.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use libbpf_rs::btf::types::{MemberAttr, Struct};
use libbpf_rs::btf::{Btf, HasSize as _};
use libbpf_rs::libbpf_sys::{
    self, BPF_MAP_TYPE_ARRAY, BPF_MAP_TYPE_STRUCT_OPS, BPF_PROG_TYPE_STRUCT_OPS, bpf_func_info, bpf_insn,
    bpf_map_create_opts, bpf_prog_load_opts,
};
use libbpf_rs::{AsRawLibbpf as _, MapCore as _, MapType};
use millrace_kernel::raw::{check, owned};

use super::Error;
use super::object::{CONFIG, GraftObject, offset_of};

/// Largest number of recipes (relocated instructions of one object file each) that are cached. When the cache is full,
/// a new recipe replaces the oldest one.
const KEPT_MAX: usize = 32;
/// The verifier's log level `BPF_LOG_STATS`, and the size of its log buffer in bytes.
const LOG_STATISTICS: u32 = 4;
const LOG_BYTES: usize = 4096;

// Opcodes of BPF instructions, and their pseudo source registers (`BPF_PSEUDO_*` in linux/bpf.h).
const LOAD_64: u8 = 0x18;
const CALL: u8 = 0x85;
const OF_MAP: u8 = 1;
const OF_MAP_VALUE: u8 = 2;
const OF_KERNEL_TYPE: u8 = 3;
const OF_FUNCTION: u8 = 4;
const CALL_OF_KERNEL: u8 = 2;

/// The recipe of one object file: its relocated instructions. The object may have no map except that of its parameters.
pub(super) struct Recipe {
    name: String,
    /// Values of all parameters as compiled into the object file; empty if it has none.
    config: Vec<u8>,
    /// Offset and length in bytes of each parameter, by its name.
    parameters: HashMap<String, (usize, usize)>,
    programs: Vec<RecipeProgram>,
    flags: u32,
    /// The object's BTF, which the verifier needs for programs of several functions; `None` if every program is a
    /// single function.
    types: Option<OwnedFd>,
}

struct RecipeProgram {
    name: CString,
    instructions: Vec<bpf_insn>,
    /// Indices of the instructions that load the address of the parameter map.
    of_config: Vec<usize>,
    /// First instruction and BTF type of each function of the program; empty if the program is a single function.
    functions: Vec<bpf_func_info>,
    /// Index of the member of `struct tcp_congestion_ops` that this program implements.
    member: u32,
}

/// Programs that were loaded from cached relocated instructions, and the struct_ops map that registers them.
pub(super) struct RecipeParts {
    map: OwnedFd,
    /// Value of the struct_ops map, which the kernel copies at registration. It refers to the programs by their
    /// descriptors.
    value: Vec<u8>,
    /// The verifier's statistics, summed over all programs of the recipe.
    pub verification: Verification,
    _programs: Vec<OwnedFd>,
    _config: Option<OwnedFd>,
}

/// The verifier's statistics for a graft.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verification {
    /// Time that the verifier took. For a program of several functions it includes the JIT compiler.
    pub time: Duration,
    /// Instructions that the verifier has processed; an instruction counts each time it is processed.
    pub instructions: u64,
}

/// Layout of the running kernel's `struct tcp_congestion_ops`, from its BTF.
struct CongestionOpsLayout {
    ops_type: u32,
    value_type: u32,
    value_bytes: usize,
    /// Offset of each member of `struct tcp_congestion_ops` in the value of a struct_ops map, in the order of the
    /// members.
    members: Vec<usize>,
    name_at: usize,
    flags_at: usize,
}

impl CongestionOpsLayout {
    /// Returns the layout, which is read from the kernel's BTF only once. `None` if that BTF lacks a needed type or
    /// member.
    fn get() -> Option<&'static Self> {
        static KERNEL: OnceLock<Option<CongestionOpsLayout>> = OnceLock::new();
        KERNEL.get_or_init(Self::read).as_ref()
    }

    fn read() -> Option<Self> {
        let btf = Btf::from_vmlinux().ok()?;
        let value: Struct<'_> = btf.type_by_name("bpf_struct_ops_tcp_congestion_ops")?;
        let data = offset_of(&value, "data")?;
        let ops: Struct<'_> = btf.type_by_name("tcp_congestion_ops")?;
        let offsets = ops.iter().map(|member| match member.attr {
            MemberAttr::Normal { offset } => Some(data + offset as usize / 8),
            MemberAttr::BitField { .. } => None,
        });
        Some(Self {
            ops_type: u32::from(ops.type_id()),
            value_type: u32::from(value.type_id()),
            value_bytes: value.size(),
            members: offsets.collect::<Option<_>>()?,
            name_at: data + offset_of(&ops, "name")?,
            flags_at: data + offset_of(&ops, "flags")?,
        })
    }
}

static KEPT: Mutex<Vec<(Vec<u8>, Arc<Recipe>)>> = Mutex::new(Vec::new());

impl Recipe {
    /// Returns the cached recipe of an object; `None` if the same image was not loaded before.
    pub fn find_loaded(image: &[u8]) -> Option<Arc<Self>> {
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().find(|(known, _)| known == image).map(|(_, recipe)| recipe.clone())
    }

    /// Makes a recipe of an object that libbpf has loaded, and caches it. `None` means that the object has maps or
    /// references that cannot be cached as relocated instructions, so libbpf has to load it each time.
    pub fn keep(image: &[u8], loaded: &libbpf_rs::Object) -> Result<Option<Arc<Self>>, Error> {
        let mut opened = GraftObject::open(image)?;
        Ok(Self::from(image, &mut opened, loaded))
    }

    fn from(image: &[u8], opened: &mut GraftObject, loaded: &libbpf_rs::Object) -> Option<Arc<Self>> {
        CongestionOpsLayout::get()?;
        let mut config = None;
        for map in loaded.maps() {
            match (map.name() == OsStr::new(CONFIG), map.map_type()) {
                (true, _) => config = Some(map.as_fd().as_raw_fd()),
                (false, MapType::StructOps) => {}
                (false, _) => return None,
            }
        }
        let programs = loaded.progs().map(|program| {
            let raw = program.as_libbpf_object().as_ptr();
            // SAFETY: the borrow keeps the object open.
            let member = unsafe { libbpf_sys::bpf_program__expected_attach_type(raw) };
            let name = CString::new(program.name().as_encoded_bytes()).ok()?;
            let instructions = program.insns().to_vec();
            let of_config = references(&instructions, config)?;
            Some(RecipeProgram { name, instructions, of_config, functions: functions(&program), member })
        });
        let programs = programs.collect::<Option<Vec<_>>>()?;
        let has_functions = programs.iter().any(|program| !program.functions.is_empty());
        let recipe = Arc::new(Self {
            name: opened.name().to_owned(),
            config: opened.config(),
            parameters: places(opened),
            flags: opened.flags(),
            programs,
            types: if has_functions { Some(types(loaded)?) } else { None },
        });
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() >= KEPT_MAX {
            kept.remove(0);
        }
        kept.push((image.to_vec(), recipe.clone()));
        Some(recipe)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Loads the programs with these parameter values, and creates the struct_ops map by which they are registered.
    ///
    /// # Errors
    /// The kernel refuses a program or a map. Loading the object with libbpf reports the reason.
    pub fn load(&self, values: &[(String, u64)]) -> io::Result<RecipeParts> {
        let kernel = CongestionOpsLayout::get().ok_or(io::ErrorKind::Unsupported)?;
        let config = if self.config.is_empty() { None } else { Some(self.load_config(values)?) };
        let load = |program: &RecipeProgram| program.load(kernel, config.as_ref(), self.types.as_ref());
        let loaded = self.programs.iter().map(load).collect::<io::Result<Vec<_>>>()?;
        let (programs, looks): (Vec<_>, Vec<_>) = loaded.into_iter().unzip();
        let mut value = vec![0; kernel.value_bytes];
        let mut put = |at: usize, bytes: &[u8]| {
            let place = value.get_mut(at..).and_then(|rest| rest.get_mut(..bytes.len()));
            place.map(|place| place.copy_from_slice(bytes)).ok_or(io::ErrorKind::Unsupported)
        };
        // The value begins with the kernel's bookkeeping (state, reference count), which stays zero.
        put(kernel.name_at, self.name.as_bytes())?;
        put(kernel.flags_at, &self.flags.to_ne_bytes())?;
        for (program, fd) in self.programs.iter().zip(&programs) {
            let at = kernel.members.get(program.member as usize).ok_or(io::ErrorKind::Unsupported)?;
            // The kernel replaces each program's descriptor by the address of the program's code.
            put(*at, &(fd.as_raw_fd() as u64).to_ne_bytes())?;
        }
        let map = self.create_map(kernel)?;
        let verification = looks.iter().fold(Verification::default(), |sum, look| Verification {
            time: sum.time + look.time,
            instructions: sum.instructions + look.instructions,
        });
        Ok(RecipeParts { map, value, verification, _programs: programs, _config: config })
    }

    fn load_config(&self, values: &[(String, u64)]) -> io::Result<OwnedFd> {
        let mut bytes = self.config.clone();
        for (name, value) in values {
            let (offset, length) = self.parameters.get(name).ok_or(io::ErrorKind::InvalidInput)?;
            let place = bytes.get_mut(*offset..).and_then(|rest| rest.get_mut(..*length));
            let place = place.ok_or(io::ErrorKind::InvalidInput)?;
            let low = value.to_le_bytes();
            let high = u64::BITS as usize / 8;
            if low.get(place.len()..high).is_some_and(|rest| rest.iter().any(|byte| *byte != 0)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            place.iter_mut().zip(low).for_each(|(to, from)| *to = from);
        }
        let options = bpf_map_create_opts {
            sz: size_of::<bpf_map_create_opts>() as libbpf_sys::size_t,
            map_flags: libbpf_sys::BPF_F_RDONLY_PROG,
            ..Default::default()
        };
        let map = create(BPF_MAP_TYPE_ARRAY, c"config", bytes.len(), &options)?;
        let key = 0_u32;
        // SAFETY: the map's values are as long as `bytes`, and both outlive the call.
        check(unsafe {
            libbpf_sys::bpf_map_update_elem(
                map.as_raw_fd(),
                (&raw const key).cast(),
                bytes.as_ptr().cast(),
                0,
            )
        })?;
        // SAFETY: the descriptor is open. After freezing, the verifier treats the map's values as constants.
        check(unsafe { libbpf_sys::bpf_map_freeze(map.as_raw_fd()) })?;
        Ok(map)
    }

    fn create_map(&self, kernel: &CongestionOpsLayout) -> io::Result<OwnedFd> {
        let options = bpf_map_create_opts {
            sz: size_of::<bpf_map_create_opts>() as libbpf_sys::size_t,
            map_flags: libbpf_sys::BPF_F_LINK,
            btf_vmlinux_value_type_id: kernel.value_type,
            btf_fd: u32::try_from(some_types()?.as_raw_fd()).map_err(io::Error::other)?,
            ..Default::default()
        };
        let name = CString::new(self.name.as_bytes()).map_err(io::Error::other)?;
        create(BPF_MAP_TYPE_STRUCT_OPS, &name, kernel.value_bytes, &options)
    }
}

/// Loads a BTF object with one integer type. The kernel demands a `btf_fd` when a map is created, but uses its own BTF
/// for struct_ops.
fn some_types() -> io::Result<&'static OwnedFd> {
    static TYPES: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(known) = TYPES.get() {
        return Ok(known);
    }
    // A BTF header (24 bytes, no offset, lengths of types and strings), one 32-bit integer (kind 1), and its name.
    let header: [u32; 6] = [0x0001_eb9f, 24, 0, 16, 16, 5];
    let int: [u32; 4] = [1, 1 << 24, 4, 32];
    let mut bytes: Vec<u8> = header.iter().chain(&int).flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend(b"\0int\0");
    // SAFETY: the bytes outlive the call, which returns a new descriptor or an error.
    let made = unsafe {
        owned(libbpf_sys::bpf_btf_load(
            bytes.as_ptr().cast(),
            bytes.len() as libbpf_sys::size_t,
            std::ptr::null_mut(),
        ))
    };
    let made = made?;
    Ok(TYPES.get_or_init(|| made))
}

fn create(
    kind: libbpf_sys::bpf_map_type,
    name: &std::ffi::CStr,
    value_bytes: usize,
    options: &bpf_map_create_opts,
) -> io::Result<OwnedFd> {
    let value_bytes = u32::try_from(value_bytes).map_err(io::Error::other)?;
    // SAFETY: name and options outlive the call, which returns a new descriptor or an error.
    unsafe { owned(libbpf_sys::bpf_map_create(kind, name.as_ptr(), 4, value_bytes, 1, options)) }
}

/// Returns the indices of the instructions that load the address of the parameter map. `None` means that an instruction
/// refers to another kernel object, whose descriptor would be invalid in a later load.
fn references(instructions: &[bpf_insn], config: Option<i32>) -> Option<Vec<usize>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(instruction) = instructions.get(at) {
        match (instruction.code, instruction.src_reg()) {
            (LOAD_64, OF_MAP | OF_MAP_VALUE) if Some(instruction.imm) == config => found.push(at),
            (LOAD_64, 0 | OF_KERNEL_TYPE | OF_FUNCTION) => {}
            (LOAD_64, _) => return None,
            // A call of a function in a kernel module refers to the module's BTF by a descriptor index, which a later
            // load would not have.
            (CALL, CALL_OF_KERNEL) if instruction.off != 0 => return None,
            _ => {}
        }
        // A 64-bit load takes two instructions; the second one holds the constant's upper half.
        at += if instruction.code == LOAD_64 { 2 } else { 1 };
    }
    Some(found)
}

/// Returns the first instruction and the BTF type of each function of a program that has more than one function.
fn functions(program: &libbpf_rs::Program<'_>) -> Vec<bpf_func_info> {
    let raw = program.as_libbpf_object().as_ptr();
    // SAFETY: the borrow keeps the program's object open; libbpf's array has as many entries as its count says.
    let all = unsafe {
        let count = libbpf_sys::bpf_program__func_info_cnt(raw) as usize;
        match libbpf_sys::bpf_program__func_info(raw) {
            first if first.is_null() || count < 2 => return Vec::new(),
            first => std::slice::from_raw_parts(first, count),
        }
    };
    all.to_vec()
}

/// Returns the object's BTF, as libbpf loaded it into the kernel. The BTF stays in the kernel while a descriptor of it
/// is open.
fn types(loaded: &libbpf_rs::Object) -> Option<OwnedFd> {
    // SAFETY: the borrow keeps the object open; its descriptor, if it has one, is cloned at once.
    unsafe {
        let fd = libbpf_sys::bpf_object__btf_fd(loaded.as_libbpf_object().as_ptr());
        if fd < 0 { None } else { BorrowedFd::borrow_raw(fd).try_clone_to_owned().ok() }
    }
}

impl RecipeProgram {
    /// Loads a program. Returns its descriptor and the verifier's statistics.
    fn load(
        &self,
        kernel: &CongestionOpsLayout,
        config: Option<&OwnedFd>,
        types: Option<&OwnedFd>,
    ) -> io::Result<(OwnedFd, Verification)> {
        let mut instructions = self.instructions.clone();
        for at in &self.of_config {
            let config = config.ok_or(io::ErrorKind::Unsupported)?;
            instructions.get_mut(*at).ok_or(io::ErrorKind::Unsupported)?.imm = config.as_raw_fd();
        }
        let mut log = [0; LOG_BYTES];
        let mut options = bpf_prog_load_opts {
            sz: size_of::<bpf_prog_load_opts>() as libbpf_sys::size_t,
            expected_attach_type: self.member,
            attach_btf_id: kernel.ops_type,
            log_level: LOG_STATISTICS,
            log_size: LOG_BYTES as u32,
            log_buf: log.as_mut_ptr().cast(),
            ..Default::default()
        };
        if !self.functions.is_empty() {
            let types = types.ok_or(io::ErrorKind::Unsupported)?;
            options.prog_btf_fd = u32::try_from(types.as_raw_fd()).map_err(io::Error::other)?;
            options.func_info = self.functions.as_ptr().cast();
            options.func_info_cnt = self.functions.len() as u32;
            options.func_info_rec_size = size_of::<bpf_func_info>() as u32;
        }
        // Congestion controls need a license that is compatible with the GPL. The kernel accepted the license of this
        // object when libbpf loaded it.
        let license = c"GPL";
        // SAFETY: all pointers outlive the call, which returns a new descriptor or an error.
        let loaded = unsafe {
            owned(libbpf_sys::bpf_prog_load(
                BPF_PROG_TYPE_STRUCT_OPS,
                self.name.as_ptr(),
                license.as_ptr(),
                instructions.as_ptr(),
                instructions.len() as libbpf_sys::size_t,
                &raw mut options,
            ))
        };
        Ok((loaded?, Verification::parse(&log)))
    }
}

impl Verification {
    /// Parses the statistics in a verifier log. A missing number counts as 0.
    fn parse(log: &[u8]) -> Self {
        let text = String::from_utf8_lossy(log);
        let number = |before: &str, behind: &str| {
            let found = text.lines().find_map(|line| line.strip_prefix(before)?.split_once(behind));
            found.and_then(|(number, _)| number.parse().ok()).unwrap_or_default()
        };
        Self {
            time: Duration::from_micros(number("verification time ", " usec")),
            instructions: number("processed ", " insns"),
        }
    }
}

fn places(object: &GraftObject) -> HashMap<String, (usize, usize)> {
    object.parameters().iter().map(|it| (it.name.clone(), (it.offset, it.bytes))).collect()
}

impl RecipeParts {
    /// Registers the congestion control with TCP. It stays registered until the returned link is closed.
    pub fn register(&self) -> io::Result<OwnedFd> {
        self.fill()?;
        // SAFETY: the call takes no pointers, and returns a new descriptor or an error.
        unsafe {
            owned(libbpf_sys::bpf_link_create(
                self.map.as_raw_fd(),
                0,
                libbpf_sys::BPF_STRUCT_OPS,
                std::ptr::null(),
            ))
        }
    }

    /// Replaces the congestion control that `link` has registered by this one, in one system call.
    pub fn replace(&self, link: BorrowedFd<'_>) -> io::Result<()> {
        self.fill()?;
        // SAFETY: both descriptors are open; no pointers are passed.
        check(unsafe {
            libbpf_sys::bpf_link_update(link.as_raw_fd(), self.map.as_raw_fd(), std::ptr::null())
        })
    }

    /// Writes the value of the struct_ops map. The kernel builds a `struct tcp_congestion_ops` from it, whose members
    /// call the programs.
    fn fill(&self) -> io::Result<()> {
        let key = 0_u32;
        // SAFETY: the value is as long as the map's, and both outlive the call.
        check(unsafe {
            libbpf_sys::bpf_map_update_elem(
                self.map.as_raw_fd(),
                (&raw const key).cast(),
                self.value.as_ptr().cast(),
                0,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(code: u8, source: u8, imm: i32, off: i16) -> bpf_insn {
        let mut it = bpf_insn { code, imm, off, ..Default::default() };
        it.set_src_reg(source);
        it
    }

    #[test]
    fn verifier_statistics_are_parsed() {
        let log = b"verification time 141 usec\nstack depth 8\nprocessed 75 insns (limit 1000000)\n\0\0";
        let want = Verification { time: Duration::from_micros(141), instructions: 75 };
        assert_eq!(Verification::parse(log), want);
        assert_eq!(Verification::parse(b"\0"), Verification::default());
    }

    #[test]
    fn bpf_program_with_unknown_map_or_kernel_references_is_not_cached() {
        let second = || instruction(0, OF_MAP, 9, 0);
        let table: [(Vec<bpf_insn>, Option<Vec<usize>>); 6] = [
            (vec![instruction(LOAD_64, OF_MAP, 7, 0), second()], Some(vec![0])),
            (
                vec![instruction(0, 0, 0, 0), instruction(LOAD_64, OF_MAP_VALUE, 7, 0), second()],
                Some(vec![1]),
            ),
            (vec![instruction(LOAD_64, OF_MAP, 8, 0), second()], None),
            (vec![instruction(LOAD_64, OF_KERNEL_TYPE, 8, 0), second()], Some(vec![])),
            (vec![instruction(CALL, CALL_OF_KERNEL, 8, 0)], Some(vec![])),
            (vec![instruction(CALL, CALL_OF_KERNEL, 8, 1)], None),
        ];
        for (instructions, wanted) in table {
            assert_eq!(references(&instructions, Some(7)), wanted, "{instructions:?}");
        }
    }
}
