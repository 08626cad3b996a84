//! Every object that build.rs makes loads into the running kernel, with the configuration that it is compiled with.
//! Needs root.

use std::os::fd::AsFd;
use std::path::Path;

use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{ObjectBuilder, Program};

const OBJECTS: &[(&str, &[u8])] = &include!(concat!(env!("OUT_DIR"), "/objects.rs"));

/// Linux allows a million instructions to be verified, and older kernels come to more for the same program. What needs many also takes
/// long to load: where this fails, a function that is checked anew for each call wants to be a global one.
const MOST_VERIFIED: u32 = 400_000;

#[test]
fn every_object() {
    assert!(!OBJECTS.is_empty());
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP every_object: needs root");
        return;
    }
    for (path, image) in OBJECTS {
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
