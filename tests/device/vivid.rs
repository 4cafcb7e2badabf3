//! A device that cannot scatter: the kernel's `vivid` camera with `allocators=1` (the machine's kernel command line), which must
//! have contiguous memory, as an NPU without an IOMMU has to.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use kvbroker::broker::{Broker, Policy};
use kvbroker::client::{Client, ClientOptions, Embedded, OpenOptions, Session, WindowPlace};
use kvbroker::heap::{DmaHeap, Memfd};
use kvbroker::profile::{Kv, Profile};
use kvbroker::window::udmabuf::Udmabuf;
use kvbroker::window::{Access, How, Means, StagingMeans, What};
use nix::errno::Errno;

use crate::support::{CMA_HEAP, EXTENT, Heap, MIB, Map};

// <linux/videodev2.h>, 64-bit.
const VIDIOC_S_FMT: libc::Ioctl = 0xc0d0_5605_u32 as libc::Ioctl;
const VIDIOC_REQBUFS: libc::Ioctl = 0xc014_5608_u32 as libc::Ioctl;
const VIDIOC_QBUF: libc::Ioctl = 0xc058_560f_u32 as libc::Ioctl;
const VIDIOC_DQBUF: libc::Ioctl = 0xc058_5611_u32 as libc::Ioctl;
const VIDIOC_STREAMON: libc::Ioctl = 0x4004_5612;
const VIDIOC_STREAMOFF: libc::Ioctl = 0x4004_5613;
const VIDIOC_S_CTRL: libc::Ioctl = 0xc008_561c_u32 as libc::Ioctl;
const VIDIOC_S_INPUT: libc::Ioctl = 0xc004_5627_u32 as libc::Ioctl;
const CAPTURE: u32 = 1;
const OUTPUT: u32 = 2;
const DMABUF: u32 = 4;
const YUYV: u32 = u32::from_le_bytes(*b"YUYV");
const ANY_FIELD: u32 = 0;
/// Bytes of a picture of the camera: 320 x 180, two bytes a pixel.
const PICTURE: usize = 320 * 180 * 2;
/// Of S-Video.
const VIDEO: usize = 720 * 576 * 2;

// vivid's inputs: 0 is a camera, 2 S-Video. Its first output is S-Video.
const CAMERA: u32 = 0;
const S_VIDEO: u32 = 2;
// Its controls (vivid-ctrls.c of 6.12): what is written over a picture (2: nothing), and which output the first S-Video input
// is connected to (0: a test picture, 2: the first output).
const OSD_TEXT_MODE: u32 = 0x00f0_f001;
const S_VIDEO_IS_CONNECTED_TO: u32 = 0x00f0_f080;

/// One of vivid's two ends.
struct End {
    file: File,
    kind: u32,
    picture: usize,
}

/// A structure of the kernel's as words.
fn set(words: &mut [u32], at: usize, value: u32) {
    words[at / 4] = value;
}

impl End {
    fn open(name: &str, kind: u32) -> End {
        let nodes = fs::read_dir("/sys/class/video4linux").expect("video devices");
        let is_it = |path: &std::path::PathBuf| {
            fs::read_to_string(path.join("name")).is_ok_and(|found| found.trim().ends_with(name))
        };
        let node = nodes.map(|entry| entry.expect("entry").path()).find(is_it).expect("vivid's device");
        let node = Path::new("/dev").join(node.file_name().expect("a name"));
        let file = fs::OpenOptions::new().read(true).write(true).open(node).expect("the video device");
        End { file, kind, picture: 0 }
    }

    fn capture(input: u32) -> End {
        let end = End::open("vid-cap", CAPTURE);
        end.call(VIDIOC_S_INPUT, &mut [input]).expect("VIDIOC_S_INPUT");
        end
    }

    fn output() -> End {
        End::open("vid-out", OUTPUT)
    }

    fn call(&self, request: libc::Ioctl, words: &mut [u32]) -> nix::Result<()> {
        // SAFETY: the caller's words are as many as the request's size says.
        Errno::result(unsafe { libc::ioctl(self.file.as_raw_fd(), request, words.as_mut_ptr()) }).map(drop)
    }

    fn control(&self, id: u32, value: u32) {
        self.call(VIDIOC_S_CTRL, &mut [id, value]).expect("VIDIOC_S_CTRL");
    }

    fn prepare(&mut self, width: u32, height: u32, buffers: u32) {
        let mut format = [0u32; 52];
        for (at, value) in [(0, self.kind), (8, width), (12, height), (16, YUYV), (20, ANY_FIELD)] {
            set(&mut format, at, value);
        }
        self.call(VIDIOC_S_FMT, &mut format).expect("VIDIOC_S_FMT");
        self.picture = (width * height * 2) as usize;
        assert_eq!(format[7] as usize, self.picture, "sizeimage");
        let mut request = [buffers, self.kind, DMABUF, 0, 0];
        self.call(VIDIOC_REQBUFS, &mut request).expect("VIDIOC_REQBUFS");
        assert!(request[0] >= buffers);
    }

    fn queue(&self, index: u32, fd: BorrowedFd) -> nix::Result<()> {
        let mut buffer = [0u32; 22];
        let bytes = self.picture as u32;
        for (at, value) in
            [(0, index), (4, self.kind), (8, bytes), (60, DMABUF), (64, fd.as_raw_fd() as u32), (72, bytes)]
        {
            set(&mut buffer, at, value);
        }
        self.call(VIDIOC_QBUF, &mut buffer)
    }

    /// The next picture: its buffer, and its bytes.
    fn dequeue(&self) -> (u32, usize) {
        let mut buffer = [0u32; 22];
        set(&mut buffer, 4, self.kind);
        set(&mut buffer, 60, DMABUF);
        self.call(VIDIOC_DQBUF, &mut buffer).expect("VIDIOC_DQBUF");
        (buffer[0], buffer[2] as usize)
    }

    fn stream(&self, on: bool) {
        let request = if on { VIDIOC_STREAMON } else { VIDIOC_STREAMOFF };
        self.call(request, &mut [self.kind]).expect("streaming");
    }
}

/// A pool of 64 blocks for a device that must have contiguous memory; each process may have a staging buffer of so many bytes.
fn broker(staging: usize) -> Embedded {
    let heap = Arc::new(DmaHeap::open(&Path::new("/dev/dma_heap").join(CMA_HEAP)).expect("the heap"));
    let staging = StagingMeans { heap, bytes: staging as u64, total: 2 * staging as u64 };
    let udmabuf = Udmabuf::open(Path::new("/dev/udmabuf")).map(Arc::new).map_err(|e| e.to_string());
    let mut broker =
        Broker::new(Arc::new(Memfd::new(false)), EXTENT as u64, 8, 8, Policy::default()).expect("a pool");
    broker.set_means(Means { access: Access::Contiguous, udmabuf, staging: Ok(staging), ..Means::default() });
    Embedded::new(broker)
}

fn client(broker: &Embedded) -> Client {
    let options = ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
    Client::on(broker, 1001, options).expect("a client")
}

fn session(client: &Client) -> Session {
    let profile = client.profile(&Profile::reference()).expect("a profile");
    client.open(&profile, OpenOptions::default()).expect("a session")
}

#[test]
fn a_device_that_cannot_scatter_refuses_a_udmabuf_and_fills_scattered_blocks_through_staging() {
    let client = client(&broker(MIB));
    // 15 planes of two pages each, from all over the pool.
    let (mut s, mut other) = (session(&client), session(&client));
    for tokens in (16..=240).step_by(16) {
        s.ensure(tokens).expect("room");
        other.ensure(tokens).expect("room");
    }
    let what = What::Plane { layer: 5, kv: Kv::K };
    let mut camera = End::capture(CAMERA);
    camera.prepare(320, 180, 2);

    let scattered = s.window(0..240, what, Some(How::Udmabuf)).expect("the kernel makes one");
    let WindowPlace::Buffer { fd, bytes, .. } = scattered.place() else { panic!("{:?}", scattered.place()) };
    assert!(bytes >= PICTURE);
    let refused = camera.queue(0, fd).expect_err("a camera that scatters is not the one this test needs");
    assert!(matches!(refused, Errno::EFAULT | Errno::EINVAL), "{refused}");

    // Left to itself the broker knows better: the configuration says that the device cannot scatter.
    let window = s.window(0..240, what, None).expect("a window");
    assert_eq!(window.how(), How::Bounce, "{:?}", window.declined());
    let WindowPlace::Staging { fd, .. } = window.place() else { panic!("{:?}", window.place()) };
    let batch = s.batch(&window, None, 0).expect("a batch").expect("a half");
    assert_eq!(batch.offset(), 0, "V4L2 knows no offset into a buffer");
    let spare = Heap::open(CMA_HEAP).expect("heap").alloc(MIB).expect("alloc");
    let seen = Map::writable(fd, MIB);
    seen.fill(0, MIB, 0);
    camera.queue(0, fd).expect("contiguous memory is taken");
    camera.queue(1, spare.as_fd()).expect("contiguous memory is taken");
    camera.stream(true);
    let bytes = loop {
        let (index, bytes) = camera.dequeue();
        if index == 0 {
            break bytes;
        }
        camera.queue(1, spare.as_fd()).expect("again");
    };
    camera.stream(false);
    assert_eq!(bytes, PICTURE);
    s.drain(&window, &batch).expect("drained");
    let mut row = [0; 512];
    let mut differing = 0;
    for token in 0..PICTURE / 512 {
        s.read_row(token, 5, Kv::K, &mut row).expect("a row");
        for (i, byte) in row.iter().enumerate() {
            assert_eq!(*byte, seen.byte(token * 512 + i), "byte {i} of token {token}");
            differing += usize::from(*byte != 0);
        }
    }
    assert!(differing > PICTURE / 2, "a test picture is not black");
    other.read_row(17, 5, Kv::K, &mut row).expect("a row");
    assert_eq!(row, [0; 512], "the other session's blocks lie between and are untouched");
}

#[test]
fn a_sessions_k_and_v_go_out_through_a_device_and_come_back_into_another_session_unchanged() {
    let broker = broker(2 * MIB);
    // Two processes, each with a staging buffer of its own: V4L2 knows no offset into one.
    let (sender, receiver) = (client(&broker), client(&broker));
    let (mut from, mut to) = (session(&sender), session(&receiver));
    // Three blocks each, of which a picture shows more than two, and none beside the next.
    const TOKENS: usize = 48;
    for tokens in (16..=TOKENS).step_by(16) {
        from.ensure(tokens).expect("room");
        to.ensure(tokens).expect("room");
    }
    let row = |token: usize, layer: usize, kv: Kv| -> [u8; 512] {
        std::array::from_fn(|i| (token * 7 + layer * 31 + kv as usize * 101 + i * 3) as u8 ^ (i >> 5) as u8)
    };
    let all = |tokens: usize| {
        let planes = (0..24).flat_map(|layer| [(layer, Kv::K), (layer, Kv::V)]);
        planes.flat_map(move |(layer, kv)| (0..tokens).map(move |token| (token, layer, kv)))
    };
    for (token, layer, kv) in all(TOKENS) {
        from.write_row(token, layer, kv, &row(token, layer, kv)).expect("a row");
    }
    let out = from.window(0..TOKENS, What::Blocks, None).expect("a window");
    let back = to.window(0..TOKENS, What::Blocks, None).expect("a window");
    assert_eq!((out.how(), back.how()), (How::Bounce, How::Bounce));
    let sent = from.load(&out, None, 0).expect("loaded").expect("a half");
    let received = to.batch(&back, None, 0).expect("a batch").expect("a half");
    assert_eq!((sent.offset(), received.offset()), (0, 0));
    assert!(sent.bytes() >= VIDEO && received.bytes() >= VIDEO);
    let buffer = |window: &kvbroker::client::Window| match window.place() {
        WindowPlace::Staging { fd, .. } => fd.try_clone_to_owned().expect("dup"),
        other => panic!("{other:?}"),
    };

    let (mut input, mut output) = (End::capture(S_VIDEO), End::output());
    input.control(S_VIDEO_IS_CONNECTED_TO, 2);
    input.control(OSD_TEXT_MODE, 2);
    input.prepare(720, 576, 1);
    output.prepare(720, 576, 1);
    output.queue(0, buffer(&out).as_fd()).expect("contiguous memory is taken");
    output.stream(true);
    input.queue(0, buffer(&back).as_fd()).expect("contiguous memory is taken");
    input.stream(true);
    // The second picture: by then the output runs for certain.
    assert_eq!(input.dequeue(), (0, VIDEO));
    input.queue(0, buffer(&back).as_fd()).expect("again");
    assert_eq!(input.dequeue(), (0, VIDEO));
    input.stream(false);
    output.stream(false);
    input.control(OSD_TEXT_MODE, 0);
    input.control(S_VIDEO_IS_CONNECTED_TO, 0);

    to.drain(&back, &received).expect("drained");
    // The picture ends within the third block.
    for (token, layer, kv) in all(32) {
        let mut came = [0; 512];
        to.read_row(token, layer, kv, &mut came).expect("a row");
        assert_eq!(came, row(token, layer, kv), "token {token}, layer {layer}, {kv:?}");
    }
    let (there, here) = (out.staging_stats(), back.staging_stats());
    assert_eq!((there.syncs_to_device, there.syncs_to_cpu), (1, 0));
    assert_eq!((here.syncs_to_device, here.syncs_to_cpu), (0, 1));
}
