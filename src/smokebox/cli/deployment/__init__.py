"""What puts a project on another machine: a wheel, an image, and the files of each platform."""
