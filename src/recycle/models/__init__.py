"""Models and data that ReCycle can train without downloads: a GPT in any number of stages, and text. Imports core and runtime."""
