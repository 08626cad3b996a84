//! For tests of crates that have BPF programs: structures compared with BTF, and objects loaded.

#![allow(clippy::expect_used, reason = "for tests")]

use std::os::fd::AsFd as _;
use std::path::Path;

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::{Enum, MemberAttr, Struct};
use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{HasSize as _, ObjectBuilder, Program};

/// A structure as Rust has it: name in C, size, and of each field the name, offset and size, in bytes.
#[derive(Debug)]
pub struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub fields: &'static [(&'static str, usize, usize)],
}

/// Compares structures with those of an object in the build directory `out`, which is `env!("OUT_DIR")` for the calling crate.
pub fn assert_layouts(out: &str, object: &str, layouts: &[Layout]) {
    let btf = btf(out, object);
    for layout in layouts {
        check(&btf, layout);
    }
}

/// The names of an enum, in order and in lower case, without `prefix` and the last one, which counts them.
pub fn enum_names(out: &str, object: &str, kind: &str, prefix: &str) -> Vec<String> {
    let btf = btf(out, object);
    let kind: Enum<'_> = btf.type_by_name(kind).expect("an enum");
    let mut names: Vec<_> = kind
        .iter()
        .map(|member| (member.value, member.name.expect("a name").to_string_lossy().to_lowercase()))
        .collect();
    names.sort_unstable();
    assert!(names.pop().expect("a count").1.ends_with('s'));
    names.into_iter().map(|(_, name)| name.trim_start_matches(prefix).to_owned()).collect()
}

fn btf(out: &str, object: &str) -> Btf<'static> {
    Btf::from_path(format!("{out}/{object}")).expect("BTF")
}

fn check(btf: &Btf<'_>, layout: &Layout) {
    let c: Struct<'_> = btf.type_by_name(layout.name).unwrap_or_else(|| panic!("no {}", layout.name));
    assert_eq!(c.size(), layout.size, "size of {}", layout.name);
    let offsets: Vec<_> = c
        .iter()
        .map(|member| match member.attr {
            MemberAttr::Normal { offset } => {
                (member.name.expect("a name").to_string_lossy().into_owned(), offset as usize / 8)
            }
            MemberAttr::BitField { .. } => panic!("bit field in {}", layout.name),
        })
        .collect();
    let mirrored: Vec<_> = layout.fields.iter().map(|(name, at, _)| ((*name).to_owned(), *at)).collect();
    assert_eq!(offsets, mirrored, "fields of {}", layout.name);
    let filled: usize = layout.fields.iter().map(|(_, _, size)| size).sum();
    assert_eq!(filled, layout.size, "implicit padding in {}", layout.name);
}

/// Linux allows a million instructions to be verified, and older kernels come to more for the same program. What needs many also takes
/// long to load: where this fails, a function that is checked anew for each call wants to be a global one.
const MOST_VERIFIED: u32 = 400_000;

/// Loads objects, `(path, image)`, into the running kernel, with the configuration that they are compiled with. Needs root.
pub fn load_objects(objects: &[(&str, &[u8])]) {
    assert!(!objects.is_empty());
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP load_objects: needs root");
        return;
    }
    for (path, image) in objects {
        let name = Path::new(path).file_name().and_then(|name| name.to_str()).expect("a name");
        // libelf wants it aligned, as a `Vec` is.
        let image = image.to_vec();
        let open = ObjectBuilder::default().open_memory(&image).expect(name);
        let object = open.load().expect(name);
        println!("{name}: {} programs, {} maps", object.progs().count(), object.maps().count());
        assert!(object.progs().count() > 0, "{name}");
        for program in object.progs() {
            // What is loaded on request only has no number here.
            let Ok(id) = Program::id_from_fd(program.as_fd()) else { continue };
            let info = ProgInfoIter::default().find(|info| info.id == id).expect(name);
            println!("{name}: {:?}: {} instructions verified", program.name(), info.verified_insns);
            assert!(
                info.verified_insns <= MOST_VERIFIED,
                "{name}: {:?}: {}",
                program.name(),
                info.verified_insns
            );
        }
    }
}
