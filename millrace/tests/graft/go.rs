//! Tests of a static Go program. It loads no libraries, so LD_PRELOAD has no effect, and its runtime makes socket calls
//! without the C library. Its connections must be tunnelled, and both ends must see the true addresses.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

use crate::{
    carried::{carry, ended, verdict, wait_for_ended, warm},
    site::{CLIENT, CLIENT6, GraftSite, PORT, SERVER, SERVER6},
};

const CONNECTIONS: usize = 8;
const BYTES: usize = 1_000_003;

/// A process that ends with the test.
struct GoServer(Child);

impl Drop for GoServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Builds the Go program. Returns `None` and prints the reason if there is no Go.
fn build(site: &GraftSite, test: &str) -> Option<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lab/examples/go-pair");
    let program = site.path("go-pair");
    let mut command = Command::new("go");
    command.args(["build", "-trimpath", "-o"]).arg(&program).arg(".").current_dir(source);
    command.envs([("CGO_ENABLED", "0"), ("GOPROXY", "off"), ("GOFLAGS", ""), ("GOTOOLCHAIN", "local")]);
    match command.output() {
        Err(error) => {
            println!("SKIP {test}: no Go: {error}");
            return None;
        }
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
    }
    // A static program names no interpreter, so the kernel alone loads it.
    let image = fs::read(&program).unwrap();
    assert!(!image.windows(8).any(|bytes| bytes == b"ld-linux"), "the Go binary is not static");
    Some(program.to_str().unwrap().to_owned())
}

fn serve(site: &GraftSite, program: &str, at: &str) -> GoServer {
    let mut command = site.command(1, program);
    command.args(["server", at]).stdout(Stdio::piped());
    let mut server = GoServer(site.spawn(1, command));
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    server
}

#[test]
fn static_go_binary_is_tunnelled_with_true_addresses() {
    let Some(site) = GraftSite::new("go") else { return };
    let Some(program) = build(&site, "static_go_binary_is_tunnelled_with_true_addresses") else { return };
    let [near, far] = warm(&site, ["", ""]);
    for (round, (server, client)) in [
        (format!("{SERVER}:{PORT}"), CLIENT.to_owned()),
        (format!("[{SERVER6}]:{PORT}"), format!("[{CLIENT6}]")),
    ]
    .into_iter()
    .enumerate()
    {
        let _serving = serve(&site, &program, &server);
        let mut command = site.command(0, &program);
        command.args(["client", &server, &CONNECTIONS.to_string(), &BYTES.to_string()]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        // The Go client checks that the received bytes are the sent ones. It also checks that the server sees the
        // client's own address, and the address that the client connected to.
        let output = site.spawn(0, command).wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8(output.stdout).unwrap();
        let mut ports = BTreeSet::new();
        for line in said.lines() {
            let fields: Vec<_> = line.split(' ').collect();
            let (ip, port) = fields[0].rsplit_once(':').unwrap();
            assert_eq!(
                (ip, fields[1], fields[2]),
                (client.as_str(), server.as_str(), &*BYTES.to_string()),
                "{said}"
            );
            ports.insert(port.parse::<u16>().unwrap());
        }
        assert_eq!(ports.len(), CONNECTIONS, "each is one of its own: {said}");
        let done = (CONNECTIONS * (round + 1)) as u64;
        assert_eq!(verdict(&near, "redirected"), done, "a connection was not tunnelled");
        wait_for_ended([&near, &far], "done", done);
    }
    let here = carry(&near);
    assert!(here.received_bytes >= (2 * CONNECTIONS * BYTES) as u64, "{here:?}");
    assert_eq!((here.connections, here.kept_bytes, ended(&near, "lost")), (0, 0, 0));
}
