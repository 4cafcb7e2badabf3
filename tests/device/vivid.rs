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
const CAPTURE: u32 = 1;
const DMABUF: u32 = 4;
const YUYV: u32 = u32::from_le_bytes(*b"YUYV");
const ANY_FIELD: u32 = 0;
/// Bytes of a picture: 320 x 180, two bytes a pixel.
const PICTURE: usize = 320 * 180 * 2;

struct Camera(File);

/// A structure of the kernel's as words.
fn set(words: &mut [u32], at: usize, value: u32) {
    words[at / 4] = value;
}

impl Camera {
    fn open() -> Camera {
        let nodes = fs::read_dir("/sys/class/video4linux").expect("video devices");
        let is_it = |path: &std::path::PathBuf| {
            fs::read_to_string(path.join("name")).is_ok_and(|name| name.trim().ends_with("vid-cap"))
        };
        let node =
            nodes.map(|entry| entry.expect("entry").path()).find(is_it).expect("vivid's capture device");
        let node = Path::new("/dev").join(node.file_name().expect("a name"));
        Camera(fs::OpenOptions::new().read(true).write(true).open(node).expect("the camera"))
    }

    fn call(&self, request: libc::Ioctl, words: &mut [u32]) -> nix::Result<()> {
        // SAFETY: the caller's words are as many as the request's size says.
        Errno::result(unsafe { libc::ioctl(self.0.as_raw_fd(), request, words.as_mut_ptr()) }).map(drop)
    }

    fn prepare(&self, buffers: u32) {
        let mut format = [0u32; 52];
        for (at, value) in [(0, CAPTURE), (8, 320), (12, 180), (16, YUYV), (20, ANY_FIELD)] {
            set(&mut format, at, value);
        }
        self.call(VIDIOC_S_FMT, &mut format).expect("VIDIOC_S_FMT");
        assert_eq!(format[7] as usize, PICTURE, "sizeimage");
        let mut request = [buffers, CAPTURE, DMABUF, 0, 0];
        self.call(VIDIOC_REQBUFS, &mut request).expect("VIDIOC_REQBUFS");
        assert!(request[0] >= buffers);
    }

    fn queue(&self, index: u32, fd: BorrowedFd) -> nix::Result<()> {
        let mut buffer = [0u32; 22];
        for (at, value) in
            [(0, index), (4, CAPTURE), (60, DMABUF), (64, fd.as_raw_fd() as u32), (72, PICTURE as u32)]
        {
            set(&mut buffer, at, value);
        }
        self.call(VIDIOC_QBUF, &mut buffer)
    }

    /// The next picture: its buffer, and its bytes.
    fn dequeue(&self) -> (u32, usize) {
        let mut buffer = [0u32; 22];
        set(&mut buffer, 4, CAPTURE);
        set(&mut buffer, 60, DMABUF);
        self.call(VIDIOC_DQBUF, &mut buffer).expect("VIDIOC_DQBUF");
        (buffer[0], buffer[2] as usize)
    }

    fn stream(&self, on: bool) {
        self.call(if on { VIDIOC_STREAMON } else { VIDIOC_STREAMOFF }, &mut [CAPTURE]).expect("streaming");
    }
}

fn session(client: &Client) -> Session {
    let profile = client.profile(&Profile::reference()).expect("a profile");
    client.open(&profile, OpenOptions::default()).expect("a session")
}

#[test]
fn a_device_that_cannot_scatter_refuses_a_udmabuf_and_fills_scattered_blocks_through_staging() {
    let staging = DmaHeap::open(&Path::new("/dev/dma_heap").join(CMA_HEAP)).expect("the heap");
    let staging = StagingMeans { heap: Arc::new(staging), bytes: MIB as u64, total: MIB as u64 };
    let udmabuf = Udmabuf::open(Path::new("/dev/udmabuf")).map(Arc::new).map_err(|e| e.to_string());
    let mut broker =
        Broker::new(Arc::new(Memfd::new(false)), EXTENT as u64, 8, 8, Policy::default()).expect("a pool");
    broker.set_means(Means { access: Access::Contiguous, udmabuf, staging: Ok(staging), ..Means::default() });
    let options = ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
    let client = Client::on(&Embedded::new(broker), 1001, options).expect("a client");
    // 15 planes of two pages each, from all over the pool.
    let (mut s, mut other) = (session(&client), session(&client));
    for tokens in (16..=240).step_by(16) {
        s.ensure(tokens).expect("room");
        other.ensure(tokens).expect("room");
    }
    let what = What::Plane { layer: 5, kv: Kv::K };
    let camera = Camera::open();
    camera.prepare(2);

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
