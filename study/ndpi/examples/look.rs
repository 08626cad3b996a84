//! Names the protocol of a connection by the first bytes of the client and the server: `look PORT CLIENT_FILE
//! [SERVER_FILE]`.

use std::{env, error::Error, fs};

use millrace_study_ndpi::{Ndpi, NdpiSample, parse, profile};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [port, files @ ..] = &arguments[..] else { return Err("look PORT CLIENT_FILE [SERVER_FILE]".into()) };
    let mut sample = NdpiSample::new(port.parse()?);
    for (file, is_client) in files.iter().zip([true, false]) {
        sample.take(is_client, &fs::read(file)?);
    }
    let (port, segments) = parse(sample.record()).ok_or("no record")?;
    match Ndpi::load()?.look(port, segments) {
        Some(found) => println!("{found:?}: {:?}", profile(&found)),
        None => println!("unknown"),
    }
    Ok(())
}
